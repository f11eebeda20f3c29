# A project that has libfsdp as a subdirectory. The compile commands are those of this build, so that ccache has the objects.
run("configure" ${configure} -S ${SOURCE_DIR}/tests/install/embedded -B ${WORK_DIR} -DFSDP_SOURCE_DIR=${SOURCE_DIR}
  -DFSDP_LIBTORCH_DIR=${LIBTORCH_DIR} -DFSDP_DISPATCH_KEY=${DISPATCH_KEY} -DFSDP_DISPATCH_KEY_OF=${DISPATCH_KEY_OF}
  -DFSDP_WARNINGS_AS_ERRORS=ON)
run("build" ${CMAKE_COMMAND} --build ${WORK_DIR} -j2)
run("run" ${WORK_DIR}/consumer)
expect_text("trained 3 steps on 1 rank" "${output}")
