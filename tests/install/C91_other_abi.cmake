# A consumer that is compiled for the other ABI of the standard library is refused when it is configured, not when it links.
expect_failure("libfsdp and its LibTorch have the C++11 ABI;take -D_GLIBCXX_USE_CXX11_ABI=0 out of its flags"
  ${configure} -S ${SOURCE_DIR}/tests/install/consumer -B ${WORK_DIR}/build
  -DCMAKE_PREFIX_PATH=${PREFIX} -DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0)
run("configure" ${configure} -S ${SOURCE_DIR}/tests/install/consumer -B ${WORK_DIR}/good
  -DCMAKE_PREFIX_PATH=${PREFIX} -DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=1)
