# libfsdp: the modules' objects in one shared library, exported as fsdp::fsdp.
get_property(_fsdp_modules GLOBAL PROPERTY FSDP_MODULES)
list(TRANSFORM _fsdp_modules PREPEND "$<TARGET_OBJECTS:" OUTPUT_VARIABLE _fsdp_objects)
list(TRANSFORM _fsdp_objects APPEND ">")

add_library(fsdp SHARED ${_fsdp_objects})
add_library(fsdp::fsdp ALIAS fsdp)
target_compile_features(fsdp PUBLIC cxx_std_20)
target_include_directories(fsdp PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
target_link_libraries(fsdp PUBLIC LibTorch::LibTorch Threads::Threads PRIVATE ${SODIUM_LIBRARY})
# An installed libfsdp finds the LibTorch that it was built against, and nothing in the build tree.
set_target_properties(fsdp PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION 0 INSTALL_RPATH_USE_LINK_PATH ON)
