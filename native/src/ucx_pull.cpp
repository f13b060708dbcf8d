#include "ucx_pull.hpp"

#include <utility>

#include "ucx_core.hpp"

namespace kvlink {

UcxPulling::UcxPulling(UcxCore& core) : Pulling(*core.packer, core.pace), core_(core) {}

void UcxPulling::open(const RingOffer& offer) {
  if (!wanted || ring_ || offer.slots > core_.settings.ring_slots || offer.slot_bytes != std::uint64_t{kSlotBytes}) {
    throw ProtocolViolation("ring of " + std::to_string(offer.slots) + " slots of " +
                            std::to_string(offer.slot_bytes) + " bytes, which nobody wanted");
  }
  ring_ = std::make_shared<const RemoteKey>(UcxSlots::from_handle(offer.handle, offer.slots * offer.slot_bytes));
  Pulling::open(offer.slots);
}

void UcxPulling::drop_stopped() {
  std::erase_if(waiting_, [this](Pull* pull) {
    const bool stopped = pull->read->stopped();
    if (stopped) failed(*pull);
    return stopped;
  });
}

bool UcxPulling::post(UcxEndpoint& endpoint) {
  bool any = false;
  while (!waiting_.empty()) {
    const auto slot = core_.staging().slots().take();
    if (!slot) break;
    Pull& pull = *waiting_.front();
    waiting_.pop_front();
    pull.bytes = core_.staging().slots().at(*slot);
    get(pull, endpoint);
    any = true;
  }
  return any;
}

void UcxPulling::get(Pull& pull, UcxEndpoint& endpoint) {
  auto& read = static_cast<UcxPackedRead&>(*pull.read);
  ++read.gets_;
  read.started_ = true;
  const auto& api = core_.context->api();
  try {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
    params.cb.send = &UcxPulling::on_get;
    params.user_data = &pull;
    params.memh = core_.staging().region().handle();
    const std::uint64_t from = ring_->address + *pull.slot * static_cast<std::uint64_t>(kSlotBytes);
    void* request = api.ucp_get_nbx(endpoint.handle(), const_cast<std::byte*>(pull.bytes),
                                    static_cast<std::size_t>(pull.stretch.end - pull.stretch.begin), from,
                                    endpoint.ring_key(ring_), &params);
    if (request == nullptr) return ended(pull, true);
    if (!UCS_PTR_IS_ERR(request)) return;  // on_get will end it
    last_error_ = api.text(UCS_PTR_STATUS(request));
  } catch (const UcxError& error) {
    last_error_ = error.what();
  }
  ended(pull, false);
}

void UcxPulling::on_get(void* request, ucs_status_t status, void* of_pull) {
  auto& pull = *static_cast<Pull*>(of_pull);
  auto& pulling = *static_cast<UcxPackedRead&>(*pull.read).pulling;
  const auto& api = pulling.core_.context->api();
  if (status != UCS_OK) pulling.last_error_ = api.text(status);
  api.ucp_request_free(request);
  pulling.ended(pull, status == UCS_OK);
}

void UcxPulling::ended(Pull& pull, bool good) {
  auto& read = static_cast<UcxPackedRead&>(*pull.read);
  --read.gets_;
  if (good) return fetched(pull, pull.bytes, false);
  read.broken_ = true;
  release(pull);
  failed(pull);
}

void UcxPulling::release(Pull& pull) {
  Slots& slots = core_.staging().slots();
  slots.give_back(static_cast<std::size_t>((pull.bytes - slots.at(0)) / slots.slot_bytes()));
}

}  // namespace kvlink
