# The installed package with a LibTorch of another version.
set(other 2.14.0)
if(LIBTORCH_VERSION VERSION_EQUAL other)
  set(other 2.13.0)
endif()
make_fake_libtorch(${WORK_DIR}/torch ${other})
expect_failure("this libfsdp was built against LibTorch ${LIBTORCH_VERSION}, but;holds ${other};-DFSDP_LIBTORCH_DIR="
  ${configure} -S ${SOURCE_DIR}/tests/install/consumer -B ${WORK_DIR}/build
  -DCMAKE_PREFIX_PATH=${PREFIX} -DFSDP_LIBTORCH_DIR=${WORK_DIR}/torch)
