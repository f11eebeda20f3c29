# What FindLibTorch says where there is no usable LibTorch. It is copied away from the source tree and its .deps, and PATH is
# emptied so that no Python's torch is found.
file(COPY ${SOURCE_DIR}/cmake/FindLibTorch.cmake DESTINATION ${WORK_DIR}/finder/cmake)
set(find ${CMAKE_COMMAND} -E env PATH=/nowhere ${CMAKE_COMMAND} -G Ninja -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}
  -S ${SOURCE_DIR}/tests/install/finder -B ${WORK_DIR}/build -DFINDER_DIR=${WORK_DIR}/finder/cmake)

expect_failure("no LibTorch found: run scripts/get_libtorch;or pass -DFSDP_LIBTORCH_DIR=" ${find})
expect_failure("holds no LibTorch;run scripts/get_libtorch" ${find} -DFSDP_LIBTORCH_DIR=${WORK_DIR}/finder)
foreach(version 1.13.1 2.10.0 2.16.0 3.0.0)
  make_fake_libtorch(${WORK_DIR}/torch-${version} ${version})
  expect_failure("LibTorch ${version} in;is outside 2.11 to 2.15;run scripts/get_libtorch"
    ${find} -DFSDP_LIBTORCH_DIR=${WORK_DIR}/torch-${version})
endforeach()
make_fake_libtorch(${WORK_DIR}/old-abi 2.15.0)
file(WRITE ${WORK_DIR}/old-abi/lib/libc10.so "std::string")
expect_failure("C++ ABI" ${find} -DFSDP_LIBTORCH_DIR=${WORK_DIR}/old-abi)
foreach(version 2.11.0 2.15.9)
  make_fake_libtorch(${WORK_DIR}/torch-${version} ${version})
  run("find ${version}" ${find} -DFSDP_LIBTORCH_DIR=${WORK_DIR}/torch-${version})
  expect_text("LibTorch ${version} in ${WORK_DIR}/torch-${version}" "${output}")
endforeach()
