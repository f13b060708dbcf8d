// The bandwidth cap, on a clock of its own: how fast, how even, how fair, and what a pause does not buy.
#include "pace.hpp"

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "asked_read.hpp"
#include "check.hpp"

using namespace kvlink;
using namespace std::chrono_literals;

namespace {

constexpr Time kStart{std::chrono::hours(1)};

struct Asked {
  Time at;
  std::int64_t bytes;
};

// Askers that always have something to ask for, each woken up to `late` after it should be.
std::vector<std::vector<Asked>> run(double rate, std::size_t askers, Duration length, Duration late) {
  const auto pace = std::make_shared<Pace>(rate);
  std::vector<Turns> turns(askers, Turns(pace));
  std::vector<Time> wake(askers, kStart);
  std::vector<std::vector<Asked>> asked(askers);
  std::mt19937 random(3);
  for (;;) {
    const auto next = static_cast<std::size_t>(std::min_element(wake.begin(), wake.end()) - wake.begin());
    if (wake[next] >= kStart + length) return asked;
    const Time now = wake[next];
    while (turns[next].may_ask(now)) {
      const auto bytes = std::min(pace->max_ask_bytes(), static_cast<std::int64_t>(random() % (1 << 19)) + 1);
      turns[next].asked(bytes);
      asked[next].push_back({now, bytes});
    }
    const Time until = turns[next].put_off_until();
    CHECK(until > now && until < Time::max());
    wake[next] = until + Duration(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(late.count() + 1)));
  }
}

std::int64_t sum(const std::vector<Asked>& asked) {
  std::int64_t bytes = 0;
  for (const Asked& one : asked) bytes += one.bytes;
  return bytes;
}

void a_cap_is_kept_and_used(double rate, std::size_t askers, Duration late) {
  const auto asked = run(rate, askers, 10s, late);
  std::int64_t all = 0;
  std::vector<std::int64_t> each;
  for (const auto& own : asked) each.push_back(sum(own));
  for (const std::int64_t bytes : each) all += bytes;
  CHECK(static_cast<double>(all) > rate * 10 * 0.95 && static_cast<double>(all) < rate * 10 * 1.05);
  const auto [least, most] = std::minmax_element(each.begin(), each.end());
  CHECK(static_cast<double>(*most - *least) < 0.1 * static_cast<double>(all) / static_cast<double>(askers));
}

void no_window_has_much_more_than_its_share(double rate) {
  std::vector<Asked> asked;
  for (const auto& own : run(rate, 3, 2s, 1ms)) asked.insert(asked.end(), own.begin(), own.end());
  std::sort(asked.begin(), asked.end(), [](const Asked& a, const Asked& b) { return a.at < b.at; });
  const double turn = std::max(rate * 0.004, static_cast<double>(kLeafBytes));
  for (std::size_t first = 0; first < asked.size(); ++first) {
    double bytes = 0;
    for (std::size_t i = first; i < asked.size() && asked[i].at < asked[first].at + 50ms; ++i) {
      bytes += static_cast<double>(asked[i].bytes);
    }
    CHECK(bytes < rate * 0.060 + 3 * 2 * turn);
  }
}

void a_pause_buys_nothing() {
  const auto pace = std::make_shared<Pace>(1e8);
  Turns turns(pace);
  const auto in_a_row = [&](Time now) {
    std::int64_t bytes = 0;
    for (; turns.may_ask(now); bytes += pace->max_ask_bytes()) turns.asked(pace->max_ask_bytes());
    return bytes;
  };
  in_a_row(kStart);
  CHECK(static_cast<double>(in_a_row(kStart + 1h)) <= 1e8 * 0.012);
}

void without_a_cap_there_is_no_wait() {
  Turns turns(nullptr);
  CHECK(turns.may_ask(kStart) && turns.may_ask() && turns.put_off_until() == Time::max());
}

void what_was_put_off_is_told_once() {
  const auto pace = std::make_shared<Pace>(1.0);
  Turns turns(pace);
  CHECK(turns.may_ask(kStart));
  turns.asked(pace->max_ask_bytes());
  CHECK(!turns.may_ask(kStart));
  CHECK(turns.put_off_until() > kStart && turns.put_off_until() == Time::max());
}

}  // namespace

int main() {
  for (const double rate : {1e6, 5e7, 1e9, 2e10}) {
    for (const std::size_t askers : {1u, 2u, 7u}) {
      a_cap_is_kept_and_used(rate, askers, 0ms);
      a_cap_is_kept_and_used(rate, askers, 2ms);
    }
  }
  for (const double rate : {5e7, 1e9}) no_window_has_much_more_than_its_share(rate);
  a_pause_buys_nothing();
  without_a_cap_there_is_no_wait();
  what_was_put_off_is_told_once();
  CHECK_REFUSED(Pace(0));
  CHECK_REFUSED(Pace(-1));
  CHECK_REFUSED(Pace(1.0 / 0.0));
}
