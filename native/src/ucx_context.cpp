#include "ucx_context.hpp"

#include <poll.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <sstream>
#include <utility>

#include "ucx_tuning.hpp"

namespace kvlink {
namespace {

Bytes bytes_of(const void* data, std::size_t length) {
  const auto* first = static_cast<const std::byte*>(data);
  return Bytes(first, first + length);
}

}  // namespace

UcxWorker::UcxWorker(const UcxApi& api, ucp_context_h context) : api_(api) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // made here, used by one other thread
  api_.check(api_.ucp_worker_create(context, &params, &handle_), "UCX worker");
  try {
    open();
  } catch (...) {
    api_.ucp_worker_destroy(handle_);
    throw;
  }
}

UcxWorker::~UcxWorker() { api_.ucp_worker_destroy(handle_); }

void UcxWorker::open() {
  api_.check(api_.ucp_worker_get_efd(handle_, &event_fd_), "UCX worker has no event descriptor");
  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  api_.check(api_.ucp_worker_get_address(handle_, &address, &length), "UCX worker address");
  address_ = bytes_of(address, length);
  api_.ucp_worker_release_address(handle_, address);
}

bool UcxWorker::arm() const {
  const ucs_status_t status = api_.ucp_worker_arm(handle_);
  if (status == UCS_ERR_BUSY) return false;
  api_.check(status, "UCX worker cannot wait");
  return true;
}

void UcxWorker::progress_or_sleep(int other_fd) const {
  if (progress() || !arm()) return;
  pollfd fds[] = {{event_fd_, POLLIN, 0}, {other_fd, POLLIN, 0}};
  poll(fds, 2, -1);
}

UcxContext::UcxContext(std::shared_ptr<const UcxApi> api, const std::optional<std::string>& tls, std::uint64_t features)
    : api_(std::move(api)) {
  init(tls, features);
  try {
    getting_ = std::make_unique<UcxWorker>(*api_, handle_);
    serving_ = std::make_unique<UcxWorker>(*api_, handle_);
  } catch (...) {
    getting_.reset();
    api_->ucp_cleanup(handle_);
    throw;
  }
}

// Old ones are leaked, with their descriptors: destroying a worker whose reply to a new connection is pending, as it
// stays when a peer goes at the wrong moment, ends the process in an assertion of UCX (seen in 1.13, not in 1.22).
UcxContext::~UcxContext() {
  if (!api_->destroys_workers_safely()) {
    static_cast<void>(getting_.release());
    static_cast<void>(serving_.release());
    return;
  }
  getting_.reset();
  serving_.reset();
  api_->ucp_cleanup(handle_);
}

void UcxContext::tune(ucp_config_t* config) const {
  for (const UcxSetting& setting : kUcxTuning) {
    if (std::getenv((std::string("UCX_") + setting.name).c_str()) != nullptr) continue;
    const ucs_status_t status = api_->ucp_config_modify(config, setting.name, setting.value);
    if (setting.required) api_->check(status, (std::string("UCX refused ") + setting.name).c_str());
  }
}

void UcxContext::init(const std::optional<std::string>& tls, std::uint64_t features) {
  ucp_config_t* read = nullptr;
  api_->check(api_->ucp_config_read(nullptr, nullptr, &read), "UCX configuration cannot be read");
  const std::unique_ptr<ucp_config_t, decltype(&::ucp_config_release)> config(read, api_->ucp_config_release);
  tune(config.get());
  if (tls) api_->check(api_->ucp_config_modify(config.get(), "TLS", tls->c_str()), "UCX refused TLS");

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = features | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;  // regions are registered while the engine's thread runs
  // Not the inline ucp_init, which would ask for the version of the headers.
  api_->check(api_->ucp_init_version(1, 13, &params, config.get(), &handle_),
              tls ? ("UCX cannot start with transports '" + *tls + "'").c_str() : "UCX cannot start");
}

// The list is told only in print: lines of "resource 1 : md 1 dev 1 flags -- tcp/eth0".
std::vector<std::string> UcxContext::transports() const {
  char* text = nullptr;
  std::size_t length = 0;
  std::FILE* stream = open_memstream(&text, &length);
  if (stream == nullptr) return {};
  api_->ucp_context_print_info(handle_, stream);
  std::fclose(stream);
  const std::unique_ptr<char, decltype(&std::free)> owner(text, std::free);

  std::set<std::string> names;
  std::istringstream lines({text, length});
  for (std::string line; std::getline(lines, line);) {
    const auto name = line.rfind(' ') + 1;
    const auto slash = line.find('/', name);
    if (line.find("resource") != std::string::npos && slash != std::string::npos) {
      names.insert(line.substr(name, slash - name));
    }
  }
  return {names.begin(), names.end()};
}

UcxRegion::UcxRegion(std::shared_ptr<UcxContext> context, std::uint64_t address, std::uint64_t length)
    : context_(std::move(context)), address_(address), length_(length) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = reinterpret_cast<void*>(address);
  params.length = length;
  context_->api().check(context_->api().ucp_mem_map(context_->handle(), &params, &handle_), "UCX registration");
}

UcxRegion::~UcxRegion() { context_->api().ucp_mem_unmap(context_->handle(), handle_); }

Bytes UcxRegion::pack_key() const {
  void* packed = nullptr;
  std::size_t length = 0;
  const auto& api = context_->api();
  api.check(api.ucp_rkey_pack(context_->handle(), handle_, &packed, &length), "UCX key");
  Bytes key = bytes_of(packed, length);
  api.ucp_rkey_buffer_release(packed);
  return key;
}

}  // namespace kvlink
