# A project that finds the installed package and nothing else, builds and runs.
run("configure" ${configure} -S ${SOURCE_DIR}/tests/install/consumer -B ${WORK_DIR} -DCMAKE_PREFIX_PATH=${PREFIX})
run("build" ${CMAKE_COMMAND} --build ${WORK_DIR})
run("run" ${CMAKE_COMMAND} -E env --unset=LD_LIBRARY_PATH ${WORK_DIR}/consumer)
expect_text("trained 3 steps on 1 rank" "${output}")
