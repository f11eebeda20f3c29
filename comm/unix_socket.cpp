#include "comm/unix_socket.h"

#include <cerrno>
#include <cstring>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <fsdp/error.h>

#include "comm/control_block.h"
#include "comm/private_file.h"
#include "comm/system_call.h"

namespace fsdp {
namespace {

constexpr std::size_t kMaxFds = kMaxWorldSize + 1;

UniqueFd make_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("socket");
  return socket;
}

// A socket address holds 107 characters and follows symbolic links; through the opened folder any depth fits and the
// folder that was checked is the one that is used.
sockaddr_un address_in(const UniqueFd& directory, const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = fmt::format("/proc/self/fd/{}/{}", directory.get(), name);
  if (path.size() >= sizeof(address.sun_path)) {
    throw InvalidArgument(fmt::format("rendezvous socket name is too long: expected at most 60 characters, got {} ({})",
                                      name.size(), name));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

// 0 or the errno.
int try_connect(const UniqueFd& socket, const sockaddr_un& address) {
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
}

// Frees a name that a killed process has left behind. Anything else under that name is somebody's and stays.
void remove_stale(const UniqueFd& directory, const std::string& name, const std::filesystem::path& path) {
  struct stat status {};
  if (::fstatat(directory.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISSOCK(status.st_mode)) {
    throw InvalidArgument(
        fmt::format("rendezvous socket {}: expected a socket or nothing, got another kind of file; "
                    "name another path with FSDP_RENDEZVOUS",
                    path.string()));
  }
  if (try_connect(make_socket(), address_in(directory, name)) != ECONNREFUSED) {
    throw InvalidArgument(
        fmt::format("rendezvous socket {}: rank 0 of another job listens there; end that job, or give "
                    "this one its own FSDP_RENDEZVOUS or MASTER_PORT",
                    path.string()));
  }
  ::unlinkat(directory.get(), name.c_str(), 0);
}

std::vector<UniqueFd> take_fds(const msghdr& header) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr;
       part = CMSG_NXTHDR(const_cast<msghdr*>(&header), part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

bool same_user(const UniqueFd& socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) throw_errno("getsockopt(SO_PEERCRED)");
  return peer.uid == ::geteuid();
}

Sent send_message(const UniqueFd& socket, std::string_view bytes, std::span<const int> fds) {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(part), fds.data(), fds.size_bytes());
  }
  if (::sendmsg(socket.get(), &header, MSG_NOSIGNAL) >= 0) return Sent::kYes;
  if (errno == EPIPE || errno == ECONNRESET) return Sent::kClosed;
  if (errno == ETOOMANYREFS || errno == EAGAIN || errno == EINTR) return Sent::kTryAgain;
  throw_errno("sendmsg");
}

std::optional<Message> receive_message(const UniqueFd& socket) {
  Message message;
  message.bytes.resize(kMaxMessageBytes);
  iovec data{message.bytes.data(), message.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t size = ::recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (size < 0) throw_errno("recvmsg");
  if (size == 0) throw std::system_error(std::make_error_code(std::errc::connection_reset), "recvmsg");
  message.bytes.resize(static_cast<std::size_t>(size));
  message.fds = take_fds(header);
  // The kernel drops the descriptors for which this process has no room.
  if (header.msg_flags & MSG_CTRUNC) throw std::system_error(EMFILE, std::generic_category(), "recvmsg");
  return message;
}

UniqueFd open_private_directory(const std::filesystem::path& directory, bool create) {
  if (create && ::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) throw_errno("mkdir " + directory.string());
  UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd) throw_errno("open of the rendezvous folder " + directory.string());
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw_errno("fstat " + directory.string());
  if (!is_private(status)) {
    throw InvalidArgument(
        fmt::format("rendezvous folder {}: expected owner {} and mode 700, got owner {} and mode {:o}; chmod 700 it, "
                    "or name another with FSDP_RENDEZVOUS",
                    directory.string(), ::geteuid(), status.st_uid, status.st_mode & 0777));
  }
  return fd;
}

ListeningSocket::ListeningSocket(const std::filesystem::path& path, bool create_directory)
    : directory_(open_private_directory(path.parent_path(), create_directory)),
      name_(path.filename()),
      socket_(make_socket()) {
  const sockaddr_un address = address_in(directory_, name_);
  const auto bind = [&] { return ::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)); };
  if (bind() != 0) {
    if (errno != EADDRINUSE) throw_errno("bind " + path.string());
    remove_stale(directory_, name_, path);
    if (bind() != 0) throw_errno("bind " + path.string());
  }
  if (::listen(socket_.get(), kMaxWorldSize) != 0) throw_errno("listen " + path.string());
}

ListeningSocket::~ListeningSocket() { ::unlinkat(directory_.get(), name_.c_str(), 0); }

std::optional<UniqueFd> ListeningSocket::accept() {
  UniqueFd connection(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (connection) return connection;
  if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return std::nullopt;
  throw_errno("accept");
}

std::optional<UniqueFd> connect_to(const std::filesystem::path& path, bool create_directory) {
  const UniqueFd directory = open_private_directory(path.parent_path(), create_directory);
  UniqueFd socket = make_socket();
  const int error = try_connect(socket, address_in(directory, path.filename()));
  if (error == 0) return socket;
  if (error == ENOENT || error == ECONNREFUSED || error == EAGAIN || error == EINTR) return std::nullopt;
  throw std::system_error(error, std::generic_category(), "connect " + path.string());
}

}  // namespace fsdp
