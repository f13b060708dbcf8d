// One UCP endpoint in peer error mode, with the peer's unpacked keys. Used by the engine's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ucx_context.hpp"

namespace kvlink {

// Ends only by force: an orderly close would wait for a peer that may be stopped. A forced close completes every
// outstanding get with an error, and after its own completion none of them can land (measured on TCP with a stopped
// and resumed source).
class UcxEndpoint {
 public:
  // Throws UcxError if the address cannot be reached with our transports.
  UcxEndpoint(std::shared_ptr<UcxContext> context, const Bytes& address);
  // Only once closed(), and with no get outstanding.
  ~UcxEndpoint();
  UcxEndpoint(const UcxEndpoint&) = delete;
  UcxEndpoint& operator=(const UcxEndpoint&) = delete;

  // UCX reported the endpoint broken; no get may be posted any more.
  bool broken() const { return status_ != UCS_OK; }
  std::string why() const { return context_->api().text(status_); }

  // Throws UcxError if UCX cannot unpack the key.
  ucp_rkey_h key(std::size_t region, const std::shared_ptr<const RemoteKey>& remote) {
    return unpacked(region + 1, remote);
  }
  ucp_rkey_h ring_key(const std::shared_ptr<const RemoteKey>& remote) { return unpacked(0, remote); }

  void close();  // idempotent
  bool closing() const { return closing_; }
  // Polled by whoever progresses the worker.
  bool closed();

  ucp_ep_h handle() const { return endpoint_; }

 private:
  static void on_error(void* self, ucp_ep_h endpoint, ucs_status_t status);
  ucp_rkey_h unpacked(std::size_t at, const std::shared_ptr<const RemoteKey>& remote);

  struct Unpacked {
    std::shared_ptr<const RemoteKey> from;
    ucp_rkey_h key;
  };

  std::shared_ptr<UcxContext> context_;
  ucp_ep_h endpoint_ = nullptr;
  ucs_status_t status_ = UCS_OK;
  bool closing_ = false;
  void* close_request_ = nullptr;
  std::vector<Unpacked> keys_;        // of the ring, then by region number
  std::vector<ucp_rkey_h> replaced_;  // gets may still use them
};

}  // namespace kvlink
