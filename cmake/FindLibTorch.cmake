# Finds LibTorch without find_package(Torch), which on a CUDA build demands a matching CUDA toolkit even for CPU use.
#
# Looked for in this order, the first place that is set or exists counts:
#   1. FSDP_LIBTORCH_DIR   a wheel's torch folder, or an unpacked LibTorch zip
#   2. .deps/venv          in the source tree, as scripts/get_libtorch makes it
#   3. the active Python   its torch package, located without importing it
# Gives: LibTorch::LibTorch, LibTorch_VERSION, LibTorch_ROOT_DIR, LibTorch_CXX11_ABI.
set(_libtorch_oldest 2.11)
set(_libtorch_newest 2.15)
set(_libtorch_remedy "run scripts/get_libtorch in the source tree, or pass -DFSDP_LIBTORCH_DIR=<a wheel's torch folder or an unpacked LibTorch zip>")

function(_libtorch_locate out)
  if(FSDP_LIBTORCH_DIR)
    set(${out} "${FSDP_LIBTORCH_DIR}" PARENT_SCOPE)
    return()
  endif()
  get_filename_component(source_dir "${CMAKE_CURRENT_FUNCTION_LIST_DIR}" DIRECTORY)
  file(GLOB found "${source_dir}/.deps/venv/lib/python3*/site-packages/torch")
  if(NOT found)
    execute_process(
      COMMAND python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# The version as wheels (version.py), zips (build-version) and headers state it; empty where none does.
function(_libtorch_read_version root out)
  set(version "")
  foreach(file version.py build-version include/torch/headeronly/version.h)
    if(EXISTS "${root}/${file}" AND NOT version)
      file(STRINGS "${root}/${file}" lines REGEX "[0-9]+\\.[0-9]+\\.[0-9]+")
      if(lines MATCHES "([0-9]+\\.[0-9]+\\.[0-9]+)")
        set(version "${CMAKE_MATCH_1}")
      endif()
    endif()
  endforeach()
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

# Sets `out` to the reason why the LibTorch in `root` cannot be used; empty if it can.
function(_libtorch_check root version abi out)
  set(reason "")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  if(NOT root)
    set(reason "no LibTorch found: ${_libtorch_remedy}")
  elseif(NOT EXISTS "${root}/lib/libtorch_cpu.so" AND NOT version)
    set(reason "${root} holds no LibTorch (expected lib/libtorch_cpu.so): ${_libtorch_remedy}")
  elseif(NOT version)
    set(reason "the LibTorch in ${root} does not state its version (version.py, build-version or torch/headeronly/version.h): ${_libtorch_remedy}")
  elseif(minor VERSION_LESS ${_libtorch_oldest} OR minor VERSION_GREATER ${_libtorch_newest})
    set(reason "LibTorch ${version} in ${root} is outside ${_libtorch_oldest} to ${_libtorch_newest}, the versions whose internals libfsdp is tested with: ${_libtorch_remedy}")
  elseif(NOT EXISTS "${root}/lib/libtorch_cpu.so")
    set(reason "LibTorch ${version} in ${root} is incomplete (expected lib/libtorch_cpu.so): ${_libtorch_remedy}")
  elseif(NOT abi)
    set(reason "LibTorch ${version} in ${root} has the C++ ABI of before C++11, which g++ no longer builds by default: ${_libtorch_remedy}")
  endif()
  set(${out} "${reason}" PARENT_SCOPE)
endfunction()

function(_libtorch_define_target root)
  if(TARGET LibTorch::LibTorch)
    return()
  endif()
  foreach(library c10 torch_cpu)
    add_library(LibTorch::${library} SHARED IMPORTED GLOBAL)
    set_target_properties(LibTorch::${library} PROPERTIES IMPORTED_LOCATION "${root}/lib/lib${library}.so")
  endforeach()
  add_library(LibTorch::LibTorch INTERFACE IMPORTED GLOBAL)
  # NDEBUG has to be what the binary was built with: LibTorch's headers lay out classes by it. Undefined symbols of the
  # libraries beneath libtorch_cpu (CUDA's runtime in a CUDA wheel) are resolved by its own rpath when it is loaded.
  set_target_properties(LibTorch::LibTorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS NDEBUG
    INTERFACE_LINK_LIBRARIES "LibTorch::torch_cpu;LibTorch::c10"
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined;-Wl,-rpath,${root}/lib")
endfunction()

_libtorch_locate(LibTorch_ROOT_DIR)
_libtorch_read_version("${LibTorch_ROOT_DIR}" LibTorch_VERSION)
set(LibTorch_CXX11_ABI 0)
if(EXISTS "${LibTorch_ROOT_DIR}/lib/libc10.so")
  file(STRINGS "${LibTorch_ROOT_DIR}/lib/libc10.so" _libtorch_cxx11_symbol REGEX "__cxx11" LIMIT_COUNT 1)
  if(_libtorch_cxx11_symbol)
    set(LibTorch_CXX11_ABI 1)
  endif()
endif()
_libtorch_check("${LibTorch_ROOT_DIR}" "${LibTorch_VERSION}" "${LibTorch_CXX11_ABI}" _libtorch_reason)

if(_libtorch_reason)
  set(LibTorch_FOUND FALSE)
  set(LibTorch_NOT_FOUND_MESSAGE "${_libtorch_reason}")
  if(LibTorch_FIND_REQUIRED)
    message(FATAL_ERROR "${_libtorch_reason}")
  endif()
else()
  set(LibTorch_FOUND TRUE)
  _libtorch_define_target("${LibTorch_ROOT_DIR}")
  if(NOT LibTorch_FIND_QUIETLY)
    message(STATUS "LibTorch ${LibTorch_VERSION} in ${LibTorch_ROOT_DIR}, C++ ABI _GLIBCXX_USE_CXX11_ABI=${LibTorch_CXX11_ABI}")
  endif()
endif()
