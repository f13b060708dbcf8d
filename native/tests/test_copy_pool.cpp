// Helpers beside a thread that takes pieces itself: every piece is taken once, work ends, and nothing is touched after
// a stop.
#include "copy_pool.hpp"

#include <chrono>
#include <ctime>
#include <numeric>
#include <vector>

#include "check.hpp"

using namespace kvlink;
using namespace std::chrono_literals;

namespace {

class Pieces final : public CopyWork {
 public:
  explicit Pieces(int count) : taken_(static_cast<std::size_t>(count)) {}

  Copied copy_some() noexcept override {
    const std::size_t mine = next_.fetch_add(1);
    if (mine >= taken_.size()) return {};
    taken_[mine] += 1;
    return {.bytes = 1, .over = done_.fetch_add(1) + 1 == taken_.size()};
  }

  bool done() const { return done_ == taken_.size(); }
  bool each_once() const {
    for (const auto& count : taken_) {
      if (count != 1) return false;
    }
    return true;
  }

 private:
  std::vector<int> taken_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> done_{0};
};

// Pieces without end.
class Endless final : public CopyWork {
 public:
  Copied copy_some() noexcept override {
    inside += 1;
    std::this_thread::sleep_for(100us);
    inside -= 1;
    copied += 1;
    return {.bytes = 1};
  }
  std::atomic<int> inside{0};
  std::atomic<int> copied{0};
};

template <typename Until>
void wait_for(Until until) {
  for (const auto end = std::chrono::steady_clock::now() + 30s; !until();) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(1ms);
  }
}

void every_piece_is_taken_once(std::size_t helpers) {
  std::atomic<int> over{0};
  CopyPool pool(helpers, [&over] { over += 1; });
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<Pieces>> works;
    for (const int count : {1, 5000, 17}) {
      pool.offer(works.emplace_back(std::make_shared<Pieces>(count)));
    }
    int ended_here = 0;
    for (const auto& work : works) {
      for (CopyWork::Copied copied; (copied = work->copy_some()).bytes > 0;) ended_here += copied.over;
    }
    wait_for([&] { return over + ended_here == 3; });
    for (const auto& work : works) CHECK(work->done() && work->each_once());
    over = 0;
  }
  wait_for([&pool] { return !pool.copying(); });
}

void helpers_alone_bring_work_to_its_end() {
  std::atomic<int> over{0};
  CopyPool pool(2, [&over] { over += 1; });
  const auto one = std::make_shared<Pieces>(100);
  const auto other = std::make_shared<Pieces>(3000);
  pool.offer(one);
  pool.offer(one);
  pool.offer(other);
  wait_for([&over] { return over == 2; });
  CHECK(one->each_once() && other->each_once());
}

void after_a_stop_nothing_is_touched() {
  const auto work = std::make_shared<Endless>();
  CopyPool pool(2, [] {});
  pool.offer(work);
  wait_for([&work] { return work->copied > 5; });
  pool.stop();
  const int copied = work->copied;
  CHECK(work->inside == 0);
  CHECK(work.use_count() == 1);
  std::this_thread::sleep_for(2ms);
  CHECK(work->copied == copied);
  pool.stop();
}

void nothing_burns_while_there_is_nothing() {
  CopyPool pool(2, [] {});
  pool.offer(std::make_shared<Pieces>(10));
  std::this_thread::sleep_for(20ms);
  const auto before = std::clock();
  std::this_thread::sleep_for(100ms);
  CHECK(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC < 0.02);
}

void a_pool_without_helpers_keeps_nothing() {
  CopyPool pool(0, [] {});
  const auto work = std::make_shared<Pieces>(1);
  pool.offer(work);
  CHECK(work.use_count() == 1 && !pool.copying() && !work->done());
}

}  // namespace

int main() {
  for (const std::size_t helpers : {0, 1, 3}) every_piece_is_taken_once(helpers);
  helpers_alone_bring_work_to_its_end();
  after_a_stop_nothing_is_touched();
  nothing_burns_while_there_is_nothing();
  a_pool_without_helpers_keeps_nothing();
}
