# Targets of this project: C++20, warnings as errors for our own files, sources listed one by one.
include(FsdpDispatchKey)

# Where libfsdp is a subdirectory of another project, a warning that a newer compiler has learnt should not stop its build.
option(FSDP_WARNINGS_AS_ERRORS "Stop at a warning in this project's own files" ${PROJECT_IS_TOP_LEVEL})

# fsdp_target(<target>): compile settings of everything that is ours.
function(fsdp_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wconversion $<$<BOOL:${FSDP_WARNINGS_AS_ERRORS}>:-Werror>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
endfunction()

# fsdp_use_torch(<target>): lets a target of ours see LibTorch, and tells it the dispatch key.
function(fsdp_use_torch target)
  fsdp_find_dispatch_key()
  target_compile_definitions(${target} PRIVATE FSDP_DISPATCH_KEY=${FSDP_DISPATCH_KEY})
  target_link_libraries(${target} PUBLIC LibTorch::LibTorch)
endfunction()

# fsdp_module(<name> [TORCH] SOURCES ... LINK ...): an object library that becomes part of libfsdp. Only a module marked
# TORCH sees LibTorch's headers.
function(fsdp_module name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH" "" "SOURCES;LINK")
  add_library(fsdp_${name} OBJECT ${arg_SOURCES})
  set_property(GLOBAL APPEND PROPERTY FSDP_MODULES fsdp_${name})
  fsdp_target(fsdp_${name})
  set_target_properties(fsdp_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET default)
  target_include_directories(fsdp_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
  target_link_libraries(fsdp_${name} PUBLIC Threads::Threads PRIVATE fmt::fmt-header-only ${arg_LINK})
  if(arg_TORCH)
    fsdp_use_torch(fsdp_${name})
  endif()
endfunction()
