# Finds what the compiled module needs and sets
#   NORTH_JAX_BUILDS_CPP, NORTH_JAX_BUILDS_CUDA   what can be built here
#   NORTH_JAX_LEFT_OUT                            one sentence on what cannot, empty if nothing
# and, where C++ is built, the languages, Python's targets, nanobind and XLA_FFI_INCLUDE_DIR.
include(CheckLanguage)

set(NORTH_JAX_BUILDS_CPP OFF)
set(NORTH_JAX_BUILDS_CUDA OFF)
set(NORTH_JAX_LEFT_OUT "")
string(TOUPPER "${NORTH_JAX_CUDA}" NORTH_JAX_CUDA)
if(NOT NORTH_JAX_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "NORTH_JAX_CUDA is ${NORTH_JAX_CUDA}, expected AUTO, ON or OFF")
endif()

# Leaves something out, unless the CUDA kernels were demanded.
function(north_jax_leave_out what why)
  if(NORTH_JAX_CUDA STREQUAL "ON")
    message(FATAL_ERROR "NORTH_JAX_CUDA=ON, but ${why}")
  endif()
  message(STATUS "north_jax: built without ${what}: ${why}")
  set(NORTH_JAX_LEFT_OUT "${what}: ${why}" PARENT_SCOPE)
endfunction()

# C++ and Python's C headers, which some distributions package apart
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  north_jax_leave_out("the C++ and CUDA operations" "no C++ compiler was found")
  return()
endif()
enable_language(CXX)
find_package(Python 3.12 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('include'))"
  OUTPUT_VARIABLE headers OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT EXISTS ${headers}/Python.h)
  north_jax_leave_out("the C++ and CUDA operations" "Python.h was not found in ${headers}")
  return()
endif()
find_package(Python 3.12 REQUIRED COMPONENTS Interpreter Development.Module Development.SABIModule)
set(NORTH_JAX_BUILDS_CPP ON)

find_package(nanobind CONFIG REQUIRED)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import jax.ffi; print(jax.ffi.include_dir())"
  OUTPUT_VARIABLE XLA_FFI_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

# CUDA
if(NORTH_JAX_CUDA STREQUAL "OFF")
  set(NORTH_JAX_LEFT_OUT "the CUDA kernels: NORTH_JAX_CUDA=OFF")
  return()
endif()
find_program(NORTH_JAX_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT NORTH_JAX_NVCC)
  north_jax_leave_out("the CUDA kernels" "nvcc was not found")
  return()
endif()
# An nvcc that is too old, or at odds with the C++ compiler, is as good as none.
set(sm_90a -gencode=arch=compute_90a,code=sm_90a)
file(WRITE ${PROJECT_BINARY_DIR}/probe.cu "__global__ void probe() {}\n")
execute_process(
  COMMAND ${NORTH_JAX_NVCC} ${sm_90a} -ccbin ${CMAKE_CXX_COMPILER} -c probe.cu -o probe.o
  WORKING_DIRECTORY ${PROJECT_BINARY_DIR} RESULT_VARIABLE failed OUTPUT_VARIABLE log ERROR_VARIABLE log)
if(failed)
  message(STATUS "${log}")
  north_jax_leave_out("the CUDA kernels" "${NORTH_JAX_NVCC} does not compile for sm_90a")
  return()
endif()
set(CMAKE_CUDA_COMPILER ${NORTH_JAX_NVCC})
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
set(CMAKE_CUDA_ARCHITECTURES OFF)  # or CMake adds its own default to the one architecture that is asked for
enable_language(CUDA)
set(NORTH_JAX_BUILDS_CUDA ON)
