# The installed package: find_package(fsdp CONFIG), <fsdp/...> headers, the library and the program.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(_fsdp_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)

install(TARGETS fsdp EXPORT fsdpTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${_fsdp_package_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fsdp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
if(TARGET fsdp_program)
  install(TARGETS fsdp_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
  INSTALL_DESTINATION ${_fsdp_package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
  ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindLibTorch.cmake
  DESTINATION ${_fsdp_package_dir})
