# The spare dispatch key that parameters carry (NOTE in memory/torch_compat.h): which of LibTorch's unused keys works depends
# on its version, and a wrong one compiles and dies at run time, so a small program is compiled and run to find out.

# fsdp_find_dispatch_key(): sets FSDP_DISPATCH_KEY in the cache. Asks again only when LibTorch's folder or version changes.
function(fsdp_find_dispatch_key)
  set(subject "${LibTorch_VERSION} in ${LibTorch_ROOT_DIR}")
  if(FSDP_DISPATCH_KEY AND FSDP_DISPATCH_KEY_OF STREQUAL subject)
    return()
  endif()
  # Sanitizers of the build are none of the probe's business, and would fail it for leaks of LibTorch's own.
  set(CMAKE_CXX_FLAGS "")
  set(CMAKE_TRY_COMPILE_CONFIGURATION Debug)
  set(CMAKE_CXX_FLAGS_DEBUG "-O0")
  set(why "")
  foreach(key DeferredInit TESTING_ONLY_GenericWrapper)
    message(CHECK_START "Trying dispatch key ${key}")
    unset(FSDP_PROBE_RUNS CACHE)
    unset(FSDP_PROBE_COMPILES CACHE)
    try_run(FSDP_PROBE_RUNS FSDP_PROBE_COMPILES
      SOURCES ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/probe_dispatch_key.cpp
      COMPILE_DEFINITIONS -DFSDP_DISPATCH_KEY=${key}
      LINK_LIBRARIES LibTorch::LibTorch
      CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
      COMPILE_OUTPUT_VARIABLE compile_output
      RUN_OUTPUT_VARIABLE run_output)
    if(FSDP_PROBE_COMPILES AND FSDP_PROBE_RUNS STREQUAL "0")
      message(CHECK_PASS "works")
      set(FSDP_DISPATCH_KEY ${key} CACHE INTERNAL "Dispatch key that sharded parameters carry")
      set(FSDP_DISPATCH_KEY_OF "${subject}" CACHE INTERNAL "LibTorch that FSDP_DISPATCH_KEY was tried with")
      return()
    endif()
    message(CHECK_FAIL "does not work")
    if(FSDP_PROBE_COMPILES)
      string(APPEND why "${key} fails when run (${FSDP_PROBE_RUNS}):\n${run_output}\n")
    else()
      string(APPEND why "${key} does not compile:\n${compile_output}\n")
    endif()
  endforeach()
  message(NOTICE "${why}")
  message(FATAL_ERROR "no spare dispatch key works with LibTorch ${subject} (above: what was tried). Take the version that scripts/get_libtorch gets.")
endfunction()
