// Finding how slots are best written: the fastest way is found and kept to, found again when the machine changes, and
// not lost by pauses between reads.
#include "stores_found.hpp"

#include <map>

#include "check.hpp"

using namespace kvlink;
using namespace std::chrono_literals;

namespace {

constexpr std::int64_t kSlot = 256 * 1024;

struct Machine {
  std::map<Stores, Duration> costs;
  Duration pause{};  // every so many slots
  int pause_every = 1 << 30;
  Time now = Time{} + 1h;
  int begun = 0;

  // How often each way was taken for the next slots.
  std::map<Stores, int> write(StoresFound& found, int slots) {
    std::map<Stores, int> taken;
    for (int i = 0; i < slots; ++i) {
      const Stores way = found.next(kSlot, now);
      taken[way] += 1;
      now += costs.at(way);
      if (++begun % pause_every == 0) now += pause;
    }
    return taken;
  }
};

void the_fastest_is_kept_to(Stores best) {
  Machine machine{.costs = {{Stores::strings, 14us}, {Stores::plain, 14us}, {Stores::streamed, 14us}}};
  machine.costs[best] = 12us;
  StoresFound found(true);
  machine.write(found, 100);
  CHECK(machine.write(found, 10'000)[best] > 9'500);
}

void what_became_slow_is_left() {
  Machine machine{.costs = {{Stores::strings, 12us}, {Stores::plain, 13us}, {Stores::streamed, 20us}}};
  StoresFound found(true);
  machine.write(found, 100'000);
  machine.costs = {{Stores::strings, 20us}, {Stores::plain, 50us}, {Stores::streamed, 12us}};
  machine.write(found, 60'000);
  CHECK(machine.write(found, 10'000)[Stores::streamed] > 9'500);
}

void pauses_between_reads_do_not_count() {
  Machine machine{.costs = {{Stores::strings, 12us}, {Stores::plain, 14us}, {Stores::streamed, 14us}},
                  .pause = 5ms,
                  .pause_every = 37};
  StoresFound found(true);
  machine.write(found, 100);
  CHECK(machine.write(found, 10'000)[Stores::strings] > 9'500);
}

void short_rows_are_no_strings() {
  Machine machine{.costs = {{Stores::strings, 1us}, {Stores::plain, 14us}, {Stores::streamed, 13us}}};
  StoresFound found(false);
  machine.write(found, 100);
  auto taken = machine.write(found, 10'000);
  CHECK(taken[Stores::strings] == 0 && taken[Stores::streamed] > 9'500);
}

}  // namespace

int main() {
  for (const Stores best : {Stores::strings, Stores::plain, Stores::streamed}) the_fastest_is_kept_to(best);
  what_became_slow_is_left();
  pauses_between_reads_do_not_count();
  short_rows_are_no_strings();
}
