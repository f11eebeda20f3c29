# The installed tree: what is in it, and that it works from there.
run("install" ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${PREFIX})
file(GLOB_RECURSE headers RELATIVE ${PREFIX}/include ${PREFIX}/include/*)
list(FILTER headers EXCLUDE REGEX "^fsdp/[a-z_]+\\.h$")
if(headers)
  message(FATAL_ERROR "expected only fsdp/*.h to be installed, got ${headers}")
endif()
run("fsdp --version" ${PREFIX}/bin/fsdp --version)
expect_text("fsdp ${VERSION} (LibTorch ${LIBTORCH_VERSION})" "${output}")
