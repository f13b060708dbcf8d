// Owners of what UCX hands out: a context with its worker, a registered region, a packed key.
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

// A UCP context and its one worker, in wake-up mode. mem_map and key packing may be called from any thread; the worker
// belongs to whoever progresses it.
class UcxContext {
 public:
  // `tls` overrides UCX_TLS. RNDV_THRESH becomes inf unless the environment sets it: without that, peer error mode
  // turns zero-copy gets on CMA into software emulation.
  UcxContext(std::shared_ptr<const UcxApi> api, const std::optional<std::string>& tls);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  const UcxApi& api() const { return *api_; }
  ucp_context_h handle() const { return context_; }
  ucp_worker_h worker() const { return worker_; }
  int event_fd() const { return event_fd_; }
  const Bytes& address() const { return address_; }

  // Transports that UCX has on this machine under these settings, as it names them: "tcp", "cma", "rc_mlx5".
  std::vector<std::string> transports() const;

  bool progress() const { return api_->ucp_worker_progress(worker_) != 0; }
  // True if the event descriptor will tell of the next event; false if there is something to progress now.
  bool arm() const;

 private:
  void init(const std::optional<std::string>& tls);
  void start_worker();

  std::shared_ptr<const UcxApi> api_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  Bytes address_;
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
