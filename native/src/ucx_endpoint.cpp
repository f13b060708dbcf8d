#include "ucx_endpoint.hpp"

#include <algorithm>

namespace kvlink {
namespace {

// UCX parses addresses and keys without being told their length. Zeros behind them end the walk of a truncated one.
constexpr std::size_t kPadding = 4096;

Bytes padded(const Bytes& bytes) {
  Bytes copy(bytes.size() + kPadding);
  std::copy(bytes.begin(), bytes.end(), copy.begin());
  return copy;
}

}  // namespace

UcxEndpoint::UcxEndpoint(std::shared_ptr<UcxContext> context, const Bytes& address) : context_(std::move(context)) {
  const Bytes copy = padded(address);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(copy.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcxEndpoint::on_error;
  params.err_handler.arg = this;
  context_->api().check(context_->api().ucp_ep_create(context_->getting().handle(), &params, &endpoint_),
                        "UCX cannot reach the peer");
}

UcxEndpoint::~UcxEndpoint() {
  for (const Unpacked& unpacked : keys_) {
    if (unpacked.key != nullptr) context_->api().ucp_rkey_destroy(unpacked.key);
  }
  for (ucp_rkey_h key : replaced_) context_->api().ucp_rkey_destroy(key);
}

void UcxEndpoint::on_error(void* self, ucp_ep_h, ucs_status_t status) {
  static_cast<UcxEndpoint*>(self)->status_ = status;  // closed by the engine, outside UCX's callback
}

ucp_rkey_h UcxEndpoint::unpacked(std::size_t at, const std::shared_ptr<const RemoteKey>& remote) {
  if (at >= keys_.size()) keys_.resize(at + 1);
  Unpacked& unpacked = keys_[at];
  if (unpacked.from != remote) {
    const Bytes copy = padded(remote->packed);
    ucp_rkey_h key = nullptr;
    context_->api().check(context_->api().ucp_ep_rkey_unpack(endpoint_, copy.data(), &key),
                          "UCX cannot use the peer's key");
    if (unpacked.key != nullptr) replaced_.push_back(unpacked.key);
    unpacked = {remote, key};
  }
  return unpacked.key;
}

void UcxEndpoint::close() {
  if (std::exchange(closing_, true)) return;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = context_->api().ucp_ep_close_nbx(endpoint_, &params);
  // An error here means that UCX has already disposed of the endpoint.
  if (request != nullptr && !UCS_PTR_IS_ERR(request)) close_request_ = request;
}

bool UcxEndpoint::closed() {
  if (!closing_) return false;
  if (close_request_ != nullptr && context_->api().ucp_request_check_status(close_request_) != UCS_INPROGRESS) {
    context_->api().ucp_request_free(std::exchange(close_request_, nullptr));
  }
  return close_request_ == nullptr;
}

}  // namespace kvlink
