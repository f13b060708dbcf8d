// Two UCX engines in one process; see two_engines.hpp.
#include "ucx_engine.hpp"

#include "two_engines.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

UcxSettings settings() {
  return {.limits = kLimits, .libucp = KVLINK_TEST_LIBUCP, .tls = "tcp", .cut_off_grace = 50ms,
          .max_gets_per_read = 16, .ring_slots = 4, .max_rings = 2, .staging_slots = 3};
}

void join(End<UcxEngine>& a, End<UcxEngine>& b) {
  const auto [near, far] = sockets();
  const auto first = a.engine.connect("other", b.engine.context().serving().address(), near);
  const auto second = b.engine.connect("other", a.engine.context().serving().address(), far);
  CHECK(a.end_of(first).outcome == Outcome::ok);
  CHECK(b.end_of(second).outcome == Outcome::ok);
  a.engine.import_key("other", 0, b.engine.export_key(0));
  b.engine.import_key("other", 0, a.engine.export_key(0));
}

}  // namespace

int main() {
  for (const bool packed : {false, true}) {
    End<UcxEngine> a(1, settings());
    End<UcxEngine> b(2, settings());
    a.packed = packed;
    join(a, b);
    read_while_calls_come_from_here(a, b);
    part_and_close(a, b);
  }
}
