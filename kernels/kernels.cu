// All kernels of this library: nvcc makes one fatbin of this file, which the library carries.
#include "kernels/copy_rows.cuh"
#include "kernels/entries.cuh"
#include "kernels/ep/entries.cuh"
#include "kernels/probe.cuh"
#include "kernels/signals.cuh"
