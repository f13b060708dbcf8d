// The yardstick: a bare loop over UCP gets, sharing nothing with the engine but the settings it must share to be a fair
// limit: peer error mode, wake-up progress, kUcxTuning. For benchmarks only.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "events.hpp"
#include "plan.hpp"
#include "ucx_context.hpp"
#include "ucx_endpoint.hpp"

namespace kvlink {

// One end. The side that is read calls serve() and waits; the other connects, imports keys and calls get().
class UcxProbe {
 public:
  UcxProbe(const std::string& libucp, const std::optional<std::string>& tls);
  ~UcxProbe();
  UcxProbe(const UcxProbe&) = delete;
  UcxProbe& operator=(const UcxProbe&) = delete;

  const Bytes& address() const { return context_->serving().address(); }
  void register_region(std::int64_t region, std::uint64_t address, std::uint64_t length);
  RemoteKey export_key(std::int64_t region) const;
  void import_key(std::int64_t region, RemoteKey key);

  // Ends serving, or the connection. Idempotent.
  void close();

  // Progresses in a thread of its own until destroyed.
  void serve();
  void connect(const Bytes& address);

  // Gets all runs of the plan, cut at max_run_bytes, `window` at a time, in the calling thread. Returns the seconds
  // from first post to last completion; making the list of runs is not counted. Throws UcxError if a get fails.
  double get(const Plan& plan, std::int64_t max_run_bytes, std::size_t window);

 private:
  struct Region {
    std::shared_ptr<const UcxRegion> local;
    std::shared_ptr<const RemoteKey> remote;
  };
  struct Flight {
    const UcxApi* api;
    std::size_t outstanding = 0;
    ucs_status_t status = UCS_OK;
  };

  void check_bounds(const Plan& plan) const;
  void post(const Run& run, Flight& flight);

  std::shared_ptr<UcxContext> context_;
  std::map<std::int64_t, Region> regions_;
  std::unique_ptr<UcxEndpoint> endpoint_;
  EventFd stop_;
  std::atomic<bool> stopping_{false};
  std::thread server_;
};

}  // namespace kvlink
