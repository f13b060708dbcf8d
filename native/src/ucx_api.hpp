// UCP through its C ABI, opened at run time: which libucp.so.0 serves is a setting, not a link line.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "unavailable.hpp"

namespace kvlink {

// UCX refused something we asked for.
class UcxError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Every entry point KVLink uses; all exist since UCX 1.13.
#define KVLINK_UCX_FUNCTIONS(X)                                                                            \
  X(ucp_get_version) X(ucp_get_version_string)                                                             \
  X(ucp_config_read) X(ucp_config_modify) X(ucp_config_release)                                            \
  X(ucp_init_version) X(ucp_cleanup) X(ucp_context_print_info)                         \
  X(ucp_worker_create) X(ucp_worker_destroy) X(ucp_worker_progress)                                        \
  X(ucp_worker_get_efd) X(ucp_worker_arm)                                                                  \
  X(ucp_worker_get_address) X(ucp_worker_release_address)                                                  \
  X(ucp_mem_map) X(ucp_mem_unmap) X(ucp_rkey_pack) X(ucp_rkey_buffer_release)                              \
  X(ucp_ep_create) X(ucp_ep_close_nbx) X(ucp_ep_rkey_unpack) X(ucp_rkey_destroy)                           \
  X(ucp_get_nbx) X(ucp_am_send_nbx) X(ucp_worker_set_am_recv_handler)                                     \
  X(ucp_request_check_status) X(ucp_request_free)                                                         \
  X(ucs_status_string)

struct UcxApi {
#define KVLINK_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  KVLINK_UCX_FUNCTIONS(KVLINK_UCX_MEMBER)
#undef KVLINK_UCX_MEMBER

  std::string version;  // "1.22.0"
  std::string path;     // the file that was loaded
  unsigned major = 0;
  unsigned minor = 0;

  // Opens libucp.so.0 by path, or by the loader's search for a bare name. One UCX serves a process, for good
  // (it leaves handlers behind that make unloading unsafe); asking for another file later is refused.
  static std::shared_ptr<const UcxApi> load(const std::string& name);

  bool destroys_workers_safely() const { return major > 1 || minor >= 20; }

  std::string text(ucs_status_t status) const { return ucs_status_string(status); }

  // Throws UcxError, "what: UCX's own word", unless status is UCS_OK.
  void check(ucs_status_t status, const char* what) const {
    if (status != UCS_OK) throw UcxError(std::string(what) + ": " + text(status));
  }
};

}  // namespace kvlink
