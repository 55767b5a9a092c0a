// --seeds=FOLDER: writes the target's seed corpus there and ends. libFuzzer does everything else.
#include <cstring>
#include <filesystem>
#include <fstream>

#include "fuzz.h"

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  constexpr const char* kFlag = "--seeds=";
  for (int i = 1; i < *count; ++i) {
    const char* argument = (*arguments)[i];
    if (std::strncmp(argument, kFlag, std::strlen(kFlag)) != 0) continue;
    const std::filesystem::path folder(argument + std::strlen(kFlag));
    std::filesystem::create_directories(folder);
    mooncake::fuzz::writeSeeds([&](const std::string& name, mooncake::ByteView input) {
      std::ofstream(folder / name, std::ios::binary)
          .write(reinterpret_cast<const char*>(input.data()), std::streamsize(input.size()));
    });
    std::exit(0);
  }
  return 0;
}
