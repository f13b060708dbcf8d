// Target side of the packed path over UCX: one get a slot, from the peer's ring into one of ours.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "pack_pull.hpp"
#include "ucx_endpoint.hpp"
#include "ucx_read.hpp"

namespace kvlink {

struct UcxCore;

class UcxPulling final : public Pulling {
 public:
  explicit UcxPulling(UcxCore& core);

  // Whether the peer was asked for a ring; it is once, when there is first something to pull.
  bool wanted = false;
  // Throws ProtocolViolation on a ring that is not as it was wanted.
  void open(const RingOffer& offer);

  // Of what is packed and waits: reads that were stopped are let go.
  void drop_stopped();
  // Gets as much as there are slots here; true if anything.
  bool post(UcxEndpoint& endpoint);
  // UCX's word for the last get that failed.
  const std::string& last_error() const { return last_error_; }

 private:
  void fetch(Pull& pull) override { waiting_.push_back(&pull); }
  void release(Pull& pull) override;
  void get(Pull& pull, UcxEndpoint& endpoint);
  void ended(Pull& pull, bool good);
  static void on_get(void* request, ucs_status_t status, void* pull);

  UcxCore& core_;
  std::shared_ptr<const RemoteKey> ring_;
  std::deque<Pull*> waiting_;
  std::string last_error_;
};

}  // namespace kvlink
