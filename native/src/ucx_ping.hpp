// The yardstick of latency: a UCX message there and back, both ends asleep in wake-up mode until it comes. For
// benchmarks and `kvlink doctor` only.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "events.hpp"
#include "ucx_context.hpp"
#include "ucx_endpoint.hpp"

namespace kvlink {

// One end. One calls serve(), the other connect() and round_trips().
class UcxPing {
 public:
  UcxPing(const std::string& libucp, const std::optional<std::string>& tls);
  ~UcxPing();
  UcxPing(const UcxPing&) = delete;
  UcxPing& operator=(const UcxPing&) = delete;

  const Bytes& address() const { return context_->serving().address(); }

  // Answers every message, in a thread of its own, until closed.
  void serve();
  void connect(const Bytes& address);

  // Seconds of each of `count` messages of 64 bytes, from its posting to its answer, one after the other in the calling
  // thread. Throws UcxError if the peer is gone.
  std::vector<double> round_trips(std::size_t count);

  // Ends serving, or the connection. Idempotent.
  void close();

 private:
  static ucs_status_t on_asked(void* self, const void* header, std::size_t header_length, void* data,
                               std::size_t length, const ucp_am_recv_param_t* params);
  static ucs_status_t on_answered(void* self, const void* header, std::size_t header_length, void* data,
                                  std::size_t length, const ucp_am_recv_param_t* params);
  void listen(const UcxWorker& worker, unsigned id, ucp_am_recv_callback_t call);
  void send(ucp_ep_h endpoint, unsigned id, unsigned flags);
  void wait_for_answer();

  std::shared_ptr<UcxContext> context_;
  std::unique_ptr<UcxEndpoint> endpoint_;
  bool answered_ = false;
  EventFd stop_;
  std::atomic<bool> stopping_{false};
  std::thread server_;
};

}  // namespace kvlink
