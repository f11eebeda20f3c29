# The cases of tests/install/CMakeLists.txt: cmake -DCASE=<name> -DWORK_DIR=... -P cases.cmake
cmake_minimum_required(VERSION 3.25)

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${what}: expected success, got ${result}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# CMake breaks the lines of a message, so blanks are compared as one.
function(expect_text text output)
  string(REGEX REPLACE "[ \n]+" " " flat "${output}")
  string(FIND "${flat}" "${text}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "expected '${text}' in:\n${output}")
  endif()
endfunction()

# Runs a command that has to fail and say all of `texts`.
function(expect_failure texts)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(result EQUAL 0)
    message(FATAL_ERROR "expected a failure that says '${texts}', got success:\n${output}")
  endif()
  foreach(text IN LISTS texts)
    expect_text("${text}" "${output}")
  endforeach()
endfunction()

# A folder that looks like LibTorch `version` to whoever does not load it.
function(make_fake_libtorch dir version)
  file(WRITE ${dir}/version.py "__version__ = '${version}+cpu'\n")
  file(WRITE ${dir}/lib/libtorch_cpu.so "not a library")
  file(WRITE ${dir}/lib/libc10.so "std::__cxx11::string")
endfunction()

set(configure ${CMAKE_COMMAND} -G Ninja -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})
include(${CMAKE_CURRENT_LIST_DIR}/${CASE}.cmake)
