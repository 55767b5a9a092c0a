#pragma once

// Counts the reports of the thread sanitizer in this process; always 0 without it.
namespace mooncake::simt {

unsigned racesReported();

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr bool kFindsRaces = true;
#else
inline constexpr bool kFindsRaces = false;
#endif
#else
inline constexpr bool kFindsRaces = false;
#endif

}  // namespace mooncake::simt
