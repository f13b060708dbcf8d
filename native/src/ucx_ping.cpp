#include "ucx_ping.hpp"

#include <array>
#include <chrono>
#include <stdexcept>

namespace kvlink {
namespace {

constexpr unsigned kAsk = 0;
constexpr unsigned kAnswer = 1;
const std::array<std::byte, 64> kMessage{};

}  // namespace

UcxPing::UcxPing(const std::string& libucp, const std::optional<std::string>& tls)
    : context_(std::make_shared<UcxContext>(UcxApi::load(libucp), tls, UCP_FEATURE_AM)) {}

UcxPing::~UcxPing() { close(); }

void UcxPing::close() {
  if (server_.joinable()) {
    stopping_ = true;
    stop_.signal();
    server_.join();
  }
  if (endpoint_) {
    endpoint_->close();
    while (!endpoint_->closed()) context_->getting().progress();
    endpoint_.reset();
  }
}

void UcxPing::serve() {
  if (server_.joinable() || endpoint_) throw std::runtime_error("a ping either serves or asks");
  listen(context_->serving(), kAsk, &UcxPing::on_asked);
  server_ = std::thread([this] {
    while (!stopping_) context_->serving().progress_or_sleep(stop_.fd());
  });
}

void UcxPing::connect(const Bytes& address) {
  if (server_.joinable() || endpoint_) throw std::runtime_error("a ping either serves or asks, of one peer");
  listen(context_->getting(), kAnswer, &UcxPing::on_answered);
  endpoint_ = std::make_unique<UcxEndpoint>(context_, address);
}

std::vector<double> UcxPing::round_trips(std::size_t count) {
  if (!endpoint_) throw std::runtime_error("connect the ping first");
  std::vector<double> seconds;
  seconds.reserve(count);
  while (seconds.size() < count) {
    const auto begin = std::chrono::steady_clock::now();
    answered_ = false;
    send(endpoint_->handle(), kAsk, UCP_AM_SEND_FLAG_REPLY);
    wait_for_answer();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return seconds;
}

void UcxPing::wait_for_answer() {
  while (!answered_) {
    if (endpoint_->broken()) throw UcxError("UCX round trip: " + endpoint_->why());
    context_->getting().progress_or_sleep(-1);
  }
}

void UcxPing::listen(const UcxWorker& worker, unsigned id, ucp_am_recv_callback_t call) {
  ucp_am_handler_param_t params{};
  params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  params.id = id;
  params.cb = call;
  params.arg = this;
  const auto& api = context_->api();
  api.check(api.ucp_worker_set_am_recv_handler(worker.handle(), &params), "UCX message handler");
}

void UcxPing::send(ucp_ep_h endpoint, unsigned id, unsigned flags) {
  const auto& api = context_->api();
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = flags | UCP_AM_SEND_FLAG_EAGER;
  void* request = api.ucp_am_send_nbx(endpoint, id, nullptr, 0, kMessage.data(), kMessage.size(), &params);
  if (UCS_PTR_IS_ERR(request)) api.check(UCS_PTR_STATUS(request), "UCX message");
  if (request != nullptr) api.ucp_request_free(request);  // its bytes are constant: nobody waits for it
}

// An answer that cannot be sent is for the asker to notice: nothing may be thrown through UCX.
ucs_status_t UcxPing::on_asked(void* self, const void*, std::size_t, void*, std::size_t,
                               const ucp_am_recv_param_t* params) {
  try {
    if (params->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) {
      static_cast<UcxPing*>(self)->send(params->reply_ep, kAnswer, 0);
    }
  } catch (const std::exception&) {
    return UCS_OK;
  }
  return UCS_OK;
}

ucs_status_t UcxPing::on_answered(void* self, const void*, std::size_t, void*, std::size_t,
                                  const ucp_am_recv_param_t*) {
  static_cast<UcxPing*>(self)->answered_ = true;
  return UCS_OK;
}

}  // namespace kvlink
