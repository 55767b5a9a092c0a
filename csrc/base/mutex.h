#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <utility>

// Locks that clang checks. Each field names the mutex that guards it, and each function the mutex
// that its caller must or must not hold; tests/lint.sh compiles with -Wthread-safety. Other
// compilers see the classes of std, and pay nothing. docs/threads.md names the locks.
#if defined(__clang__) && !defined(__CUDACC__)
#define MOONCAKE_LOCKS(attribute) __attribute__((attribute))
#else
#define MOONCAKE_LOCKS(attribute)
#endif

// Of a class: its objects are locks, or hold a lock from their beginning to their end.
#define CAPABILITY(name) MOONCAKE_LOCKS(capability(name))
#define SCOPED_CAPABILITY MOONCAKE_LOCKS(scoped_lockable)
// Of a field: it is only used with the mutex held. PT_GUARDED_BY: the object behind the pointer is.
#define GUARDED_BY(mutex) MOONCAKE_LOCKS(guarded_by(mutex))
#define PT_GUARDED_BY(mutex) MOONCAKE_LOCKS(pt_guarded_by(mutex))
// Of a function: the caller holds the mutex, at least shared, or must not hold it.
#define REQUIRES(...) MOONCAKE_LOCKS(requires_capability(__VA_ARGS__))
#define REQUIRES_SHARED(...) MOONCAKE_LOCKS(requires_shared_capability(__VA_ARGS__))
#define EXCLUDES(...) MOONCAKE_LOCKS(locks_excluded(__VA_ARGS__))
// Of a function: it takes the mutex or gives it back. TRY_ACQUIRE: it has if it returns `true`.
#define ACQUIRE(...) MOONCAKE_LOCKS(acquire_capability(__VA_ARGS__))
#define ACQUIRE_SHARED(...) MOONCAKE_LOCKS(acquire_shared_capability(__VA_ARGS__))
#define RELEASE(...) MOONCAKE_LOCKS(release_capability(__VA_ARGS__))
#define RELEASE_SHARED(...) MOONCAKE_LOCKS(release_shared_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) MOONCAKE_LOCKS(try_acquire_capability(__VA_ARGS__))
// Of a function: from here on the checker takes the mutex as held. The comment at the call says why.
#define ASSERT_HELD(...) MOONCAKE_LOCKS(assert_capability(__VA_ARGS__))
#define RETURNS_LOCK(mutex) MOONCAKE_LOCKS(lock_returned(mutex))
// Of a function that the checker does not understand: the comment beside it says why.
#define NOT_CHECKED MOONCAKE_LOCKS(no_thread_safety_analysis)

namespace mooncake {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  // For the checker alone, which cannot see that a lambda runs while its maker holds the mutex.
  void assertHeld() const ASSERT_HELD() {}

 private:
  friend class Condition;
  std::mutex mutex_;
};

class CAPABILITY("mutex") SharedMutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  void lock_shared() ACQUIRE_SHARED() { mutex_.lock_shared(); }
  void unlock_shared() RELEASE_SHARED() { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
};

class CAPABILITY("mutex") RecursiveMutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  std::recursive_mutex mutex_;
};

// Holds a mutex to the end of the scope; unlock() and lock() interrupt that.
class SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  // After a try_lock() that took the mutex.
  Lock(Mutex& mutex, std::adopt_lock_t) REQUIRES(mutex) : mutex_(mutex) {}
  ~Lock() RELEASE() {
    if (isHeld_) mutex_.unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() ACQUIRE() {
    mutex_.lock();
    isHeld_ = true;
  }
  void unlock() RELEASE() {
    isHeld_ = false;
    mutex_.unlock();
  }

 private:
  Mutex& mutex_;
  bool isHeld_ = true;
};

// Gives a held mutex back, and takes it again at the end of the scope.
class SCOPED_CAPABILITY UnlockedScope {
 public:
  explicit UnlockedScope(Mutex& mutex) RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~UnlockedScope() RELEASE() { mutex_.lock(); }
  UnlockedScope(const UnlockedScope&) = delete;
  UnlockedScope& operator=(const UnlockedScope&) = delete;

 private:
  Mutex& mutex_;
};

// Holds a lock of another class to the end of the scope, alone.
template <typename AnyMutex>
class SCOPED_CAPABILITY Guard {
 public:
  explicit Guard(AnyMutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  Guard(AnyMutex& mutex, std::adopt_lock_t) REQUIRES(mutex) : mutex_(mutex) {}
  ~Guard() RELEASE() { mutex_.unlock(); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  AnyMutex& mutex_;
};

// Holds a mutex to the end of the scope, with other readers.
class SCOPED_CAPABILITY SharedLock {
 public:
  explicit SharedLock(SharedMutex& mutex) ACQUIRE_SHARED(mutex) : mutex_(mutex) {
    mutex_.lock_shared();
  }
  ~SharedLock() RELEASE() { mutex_.unlock_shared(); }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;

 private:
  SharedMutex& mutex_;
};

// A condition variable of a Mutex, which the caller of a wait holds. Predicates run with it held:
// `[&]() REQUIRES(mutex_) { ... }`.
class Condition {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock held(mutex.mutex_, std::adopt_lock);
    condition_.wait(held);
    held.release();
  }
  template <typename When>
  std::cv_status wait_until(Mutex& mutex, When when) REQUIRES(mutex) {
    std::unique_lock held(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = condition_.wait_until(held, when);
    held.release();
    return status;
  }
  template <typename Duration>
  std::cv_status wait_for(Mutex& mutex, Duration patience) REQUIRES(mutex) {
    return wait_until(mutex, std::chrono::steady_clock::now() + patience);
  }

  // Not checked inside: the predicate names the caller's mutex, which is `mutex` here.
  template <typename Predicate>
  void wait(Mutex& mutex, Predicate holds) REQUIRES(mutex) NOT_CHECKED {
    while (!holds()) wait(mutex);
  }
  // Returns whether the predicate holds at last.
  template <typename When, typename Predicate>
  bool wait_until(Mutex& mutex, When when, Predicate holds) REQUIRES(mutex) NOT_CHECKED {
    while (!holds()) {
      if (wait_until(mutex, when) == std::cv_status::timeout) return holds();
    }
    return true;
  }
  template <typename Duration, typename Predicate>
  bool wait_for(Mutex& mutex, Duration patience, Predicate holds) REQUIRES(mutex) NOT_CHECKED {
    return wait_until(mutex, std::chrono::steady_clock::now() + patience, std::move(holds));
  }

 private:
  std::condition_variable condition_;
};

}  // namespace mooncake
