// Owners of what UCX hands out: a context with its workers, a registered region, a packed key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ucx_api.hpp"

namespace kvlink {

using Bytes = std::vector<std::byte>;

// A UCP worker in wake-up mode; it belongs to whoever progresses it.
class UcxWorker {
 public:
  UcxWorker(const UcxApi& api, ucp_context_h context);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h handle() const { return handle_; }
  int event_fd() const { return event_fd_; }
  const Bytes& address() const { return address_; }

  bool progress() const { return api_.ucp_worker_progress(handle_) != 0; }
  // True if the event descriptor will tell of the next event; false if there is something to progress now.
  bool arm() const;
  // Progress once, or wait for something to progress, or for `other_fd` (-1: nothing else) to be readable.
  void progress_or_sleep(int other_fd) const;

 private:
  void open();

  const UcxApi& api_;
  ucp_worker_h handle_ = nullptr;
  int event_fd_ = -1;
  Bytes address_;
};

// A UCP context with two workers, whose mem_map and key packing may be called from any thread.
//
// Two, because UCX pairs the endpoints that two workers make to each other by counting them. After one side has closed
// some by force the counts differ, and a new endpoint is paired with a dead one: its gets then never end (measured over
// TCP, with both sides reading from each other). So one worker only makes endpoints, the other is only connected to.
class UcxContext {
 public:
  // `tls` overrides UCX_TLS; what kUcxTuning lists is set, unless the environment sets it. `features` are UCP's.
  UcxContext(std::shared_ptr<const UcxApi> api, const std::optional<std::string>& tls,
             std::uint64_t features = UCP_FEATURE_RMA);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  const UcxApi& api() const { return *api_; }
  ucp_context_h handle() const { return handle_; }
  // Makes endpoints and gets.
  const UcxWorker& getting() const { return *getting_; }
  // Answers the gets of others; its address is what peers are told.
  const UcxWorker& serving() const { return *serving_; }

  // Transports that UCX has on this machine under these settings, as it names them: "tcp", "cma", "rc_mlx5".
  std::vector<std::string> transports() const;

 private:
  void init(const std::optional<std::string>& tls, std::uint64_t features);
  void tune(ucp_config_t* config) const;

  std::shared_ptr<const UcxApi> api_;
  ucp_context_h handle_ = nullptr;
  std::unique_ptr<UcxWorker> getting_;
  std::unique_ptr<UcxWorker> serving_;
};

// Memory that gets may fill and peers may read, until destroyed.
class UcxRegion {
 public:
  UcxRegion(std::shared_ptr<UcxContext> context, std::uint64_t address, std::uint64_t length);
  ~UcxRegion();
  UcxRegion(const UcxRegion&) = delete;
  UcxRegion& operator=(const UcxRegion&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::uint64_t address() const { return address_; }
  std::uint64_t length() const { return length_; }
  ucp_mem_h handle() const { return handle_; }
  Bytes pack_key() const;

 private:
  std::shared_ptr<UcxContext> context_;
  std::uint64_t address_;
  std::uint64_t length_;
  ucp_mem_h handle_ = nullptr;
};

// A peer's region, as it told us.
struct RemoteKey {
  std::uint64_t address;
  std::uint64_t length;
  Bytes packed;
};

}  // namespace kvlink
