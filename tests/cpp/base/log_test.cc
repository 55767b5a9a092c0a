#include "base/log.h"

#include <cctype>
#include <cerrno>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <string>
#include <unistd.h>

#include "base/dtype.h"
#include "base/fd.h"
#include "base/result.h"

namespace mooncake {
namespace {

std::string printed(std::string_view text) {
  testing::internal::CaptureStderr();
  logLine(LogLevel::kWarning, "rank 3", text);
  return testing::internal::GetCapturedStderr();
}

TEST(Log, OneLineSaysWhenHowBadWhoAndWhat) {
  const std::string line = printed("rank 5 exited");
  std::string shape = line.substr(0, 27);
  for (char& c : shape) c = std::isdigit(static_cast<unsigned char>(c)) ? '0' : c;
  EXPECT_EQ(shape, "0000-00-00T00:00:00.000000Z");
  EXPECT_EQ(line.substr(27), " mooncake W rank 3: rank 5 exited\n");
}

TEST(Log, TextCannotForgeALineNorFillAPipe) {
  const std::string line = printed("a\nb\x1b[2J\r" + std::string(100'000, 'x'));
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  EXPECT_EQ(line.find('\x1b'), std::string::npos);
  EXPECT_EQ(line.size(), 4096u);
}

TEST(Log, NobodyWaitsForAPipeThatIsFull) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Fd out(ends[0]);
  Fd in(ends[1]);
  const std::string block(4096, 'x');
  ASSERT_EQ(::fcntl(in.get(), F_SETFL, O_NONBLOCK), 0);
  while (::write(in.get(), block.data(), block.size()) > 0) continue;
  ASSERT_EQ(::fcntl(in.get(), F_SETFL, 0), 0);

  const Fd before(::dup(STDERR_FILENO));
  ASSERT_EQ(::dup2(in.get(), STDERR_FILENO), STDERR_FILENO);
  logLine(LogLevel::kError, "rank 3", "lost");  // would block for ever
  ASSERT_EQ(::dup2(before.get(), STDERR_FILENO), STDERR_FILENO);
}

TEST(Log, LevelsHaveNames) {
  EXPECT_EQ(logLevelFromName("debug"), LogLevel::kDebug);
  EXPECT_EQ(logLevelFromName("DEBUG"), std::nullopt);
  EXPECT_TRUE(logEnabled(LogLevel::kError));
}

TEST(Result, ErrorsSayWhat) {
  const Status failed = systemError("connect(10.0.0.1:4711)", ECONNREFUSED);
  EXPECT_EQ(failed.code(), ErrorCode::kSystem);
  EXPECT_EQ(failed.error().message, "connect(10.0.0.1:4711): Connection refused");
  const Result<int> passedOn = failed;
  EXPECT_FALSE(passedOn.ok());
  EXPECT_EQ(passedOn.error().message, failed.error().message);
  EXPECT_STREQ(errorCodeName(ErrorCode::kPeerLost), "peer lost");
  EXPECT_STREQ(errorCodeName(static_cast<ErrorCode>(200)), "unknown error");
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(dtypeSize(DType::kComplex128), 16u);
  EXPECT_STREQ(dtypeName(DType::kBFloat16), "bfloat16");
  EXPECT_TRUE(isReducible(DType::kBool));
  EXPECT_FALSE(isReducible(DType::kFloat8E5M2));
  EXPECT_EQ(dtypeSize(static_cast<DType>(200)), 0u);
  EXPECT_STREQ(reduceName(ReduceKind::kProduct), "PRODUCT");
}

}  // namespace
}  // namespace mooncake
