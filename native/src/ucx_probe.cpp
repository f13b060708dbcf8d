#include "ucx_probe.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <vector>

namespace kvlink {

UcxProbe::UcxProbe(const std::string& libucp, const std::optional<std::string>& tls)
    : context_(std::make_shared<UcxContext>(UcxApi::load(libucp), tls)) {}

UcxProbe::~UcxProbe() { close(); }

void UcxProbe::close() {
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

void UcxProbe::register_region(std::int64_t region, std::uint64_t address, std::uint64_t length) {
  regions_[region].local = std::make_shared<const UcxRegion>(context_, address, length);
}

RemoteKey UcxProbe::export_key(std::int64_t region) const {
  const auto& local = *regions_.at(region).local;
  return {local.address(), local.length(), local.pack_key()};
}

void UcxProbe::import_key(std::int64_t region, RemoteKey key) {
  regions_[region].remote = std::make_shared<const RemoteKey>(std::move(key));
}

void UcxProbe::serve() {
  if (server_.joinable() || endpoint_) throw std::runtime_error("a probe either serves or gets");
  server_ = std::thread([this] {
    while (!stopping_) context_->serving().progress_or_sleep(stop_.fd());
  });
}

void UcxProbe::connect(const Bytes& address) {
  if (server_.joinable() || endpoint_) throw std::runtime_error("a probe either serves or gets, from one peer");
  endpoint_ = std::make_unique<UcxEndpoint>(context_, address);
}

void UcxProbe::check_bounds(const Plan& plan) const {
  std::vector<std::int64_t> local;
  std::vector<std::int64_t> remote;
  for (const auto& [number, region] : regions_) {
    const auto size = static_cast<std::size_t>(number) + 1;
    local.resize(size, 0);
    remote.resize(size, 0);
    if (region.local) local.back() = static_cast<std::int64_t>(region.local->length());
    if (region.remote) remote.back() = static_cast<std::int64_t>(region.remote->length);
  }
  plan.check_bounds(Side::target, local);
  plan.check_bounds(Side::source, remote);
}

double UcxProbe::get(const Plan& plan, std::int64_t max_run_bytes, std::size_t window) {
  if (!endpoint_) throw std::runtime_error("connect the probe first");
  check_bounds(plan);
  std::vector<Run> runs;
  Cursor cursor(plan, 0, plan.total_bytes(), Walk::both, max_run_bytes);
  for (Run run; cursor.next(run);) runs.push_back(run);

  Flight flight{&context_->api()};
  const auto begin = std::chrono::steady_clock::now();
  for (const Run& run : runs) {
    while (flight.outstanding >= window) context_->getting().progress_or_sleep(-1);
    if (flight.status != UCS_OK) break;
    post(run, flight);
  }
  while (flight.outstanding > 0) context_->getting().progress_or_sleep(-1);
  const auto end = std::chrono::steady_clock::now();
  context_->api().check(flight.status, "bare get");
  return std::chrono::duration<double>(end - begin).count();
}

void UcxProbe::post(const Run& run, Flight& flight) {
  const Region& to = regions_.at(run.target_region);
  const Region& from = regions_.at(run.source_region);
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  params.user_data = &flight;
  params.memh = to.local->handle();
  params.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    auto& landed = *static_cast<Flight*>(user_data);
    --landed.outstanding;
    if (status != UCS_OK) landed.status = status;
    landed.api->ucp_request_free(request);
  };
  void* request = flight.api->ucp_get_nbx(
      endpoint_->handle(), to.local->data() + run.target_offset, static_cast<std::size_t>(run.bytes),
      from.remote->address + static_cast<std::uint64_t>(run.source_offset),
      endpoint_->key(static_cast<std::size_t>(run.source_region), from.remote), &params);
  if (UCS_PTR_IS_ERR(request)) {
    flight.status = UCS_PTR_STATUS(request);
  } else if (request != nullptr) {
    ++flight.outstanding;
  }
}

}  // namespace kvlink
