// All kernels of this library: nvcc makes one fatbin of this file, which the library carries.
#include "kernels/probe.cuh"
