#include "device/cuda/kernel_image.h"

// CMakeLists.txt names the folder of the file to the assembler.
asm(R"(
  .pushsection .rodata
  .balign 64
mooncakeKernelImage:
  .incbin "kernels.fatbin"
mooncakeKernelImageEnd:
  .byte 0
  .popsection
)");

extern "C" {
extern const std::byte begin[] asm("mooncakeKernelImage") __attribute__((visibility("hidden")));
extern const std::byte end[] asm("mooncakeKernelImageEnd") __attribute__((visibility("hidden")));
}

namespace mooncake {

std::span<const std::byte> kernelImage() { return {begin, end}; }

}  // namespace mooncake
