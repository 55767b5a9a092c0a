#include "engine/memory/descriptor_offers.h"

#include <chrono>
#include <future>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <thread>
#include <vector>

#include "base/unix_socket.h"

namespace mooncake::testing {
namespace {

class DescriptorOffersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    loop_ = std::move(*EventLoop::start("test"));
    theirs_ = std::move(*EventLoop::start("reader"));
    offers_ = std::move(*DescriptorOffers::start(*loop_));
  }
  void TearDown() override {
    theirs_->stop();
    loop_->stop();
    offers_.reset();
  }
  static Fd file(off_t bytes) {
    Fd made(::memfd_create("test", MFD_CLOEXEC));
    EXPECT_EQ(::ftruncate(made.get(), bytes), 0);
    return made;
  }
  // Returns the size of the file that comes, or the error as a negative number.
  int64_t ask(const std::string& handle, uint64_t number,
              std::chrono::milliseconds limit = std::chrono::seconds(10)) {
    std::promise<int64_t> done;
    theirs_->post([&] {
      requestDescriptor(
          *theirs_, {.handle = handle, .allocation = number, .offset = 0, .bytes = 0},
          Deadline::after(limit), [&](const Result<Fd>& got) {
            struct stat found {};
            if (got.ok()) EXPECT_EQ(::fstat(got->get(), &found), 0);
            done.set_value(got.ok() ? int64_t(found.st_size) : -int64_t(got.error().code));
          });
    });
    return done.get_future().get();
  }
  // A connection that sends so many bytes of a request and no more.
  Fd guest(size_t bytes) {
    auto socket =
        connectAbstract(offers_->handle().substr(32), Deadline::after(std::chrono::seconds(5)));
    EXPECT_TRUE(socket.ok());
    const std::string part = offers_->handle().substr(0, bytes);
    EXPECT_EQ(::send(socket->get(), part.data(), part.size(), MSG_NOSIGNAL), ssize_t(part.size()));
    return std::move(*socket);
  }

  std::unique_ptr<EventLoop> loop_, theirs_;
  std::unique_ptr<DescriptorOffers> offers_;
};

TEST_F(DescriptorOffersTest, HandsOverTheOfferThatWasAskedFor) {
  EXPECT_LE(offers_->handle().size(), 64u) << "it must fit DeviceExports";
  const uint64_t first = offers_->add(file(1000)), second = offers_->add(file(2000));
  EXPECT_EQ(ask(offers_->handle(), second), 2000);
  EXPECT_EQ(ask(offers_->handle(), first), 1000);
  EXPECT_EQ(ask(offers_->handle(), first), 1000);
}

TEST_F(DescriptorOffersTest, AStrangerGetsNothing) {
  const uint64_t number = offers_->add(file(1000));
  std::string wrong = offers_->handle();
  wrong[31] = wrong[31] == 'a' ? 'b' : 'a';
  EXPECT_LT(ask(wrong, number), 0);
  EXPECT_LT(ask(offers_->handle(), number + 1), 0);
  EXPECT_LT(ask(offers_->handle(), 0), 0);
  EXPECT_EQ(ask(std::string(32, 'x') + "nobody listens here", number),
            -int64_t(ErrorCode::kUnsupported));
  for (const size_t bytes : {size_t{0}, size_t{5}, size_t{32}})
    EXPECT_EQ(ask(std::string(bytes, 'x'), number), -int64_t(ErrorCode::kProtocol));
  EXPECT_EQ(ask(offers_->handle(), number), 1000);
}

TEST_F(DescriptorOffersTest, GuestsThatSayNothingDoNotCrowdOthersOut) {
  const uint64_t number = offers_->add(file(1000));
  std::vector<Fd> silent;
  for (size_t i = 0; i < 3 * DescriptorOffers::kMostGuests; ++i) silent.push_back(guest(i % 33));
  EXPECT_EQ(ask(offers_->handle(), number), 1000);
}

TEST_F(DescriptorOffersTest, AnOwnerThatDoesNotAnswerIsWaitedForUntilTheDeadline) {
  const uint64_t number = offers_->add(file(1000));
  std::promise<void> goesOn;
  loop_->post([&] { goesOn.get_future().wait(); });
  EXPECT_EQ(ask(offers_->handle(), number, std::chrono::milliseconds(50)),
            -int64_t(ErrorCode::kTimeout));
  goesOn.set_value();
  EXPECT_EQ(ask(offers_->handle(), number), 1000);
}

}  // namespace
}  // namespace mooncake::testing
