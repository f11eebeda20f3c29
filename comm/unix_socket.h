// Unix sockets that carry whole messages and file descriptors between the processes of one user on one host.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/unique_fd.h"

namespace fsdp {

// At most this many bytes, never none, and at most kMaxWorldSize + 1 descriptors.
inline constexpr std::size_t kMaxMessageBytes = 4096;

struct Message {
  std::string bytes;
  std::vector<UniqueFd> fds;
};

// A process of the same user at the other end? Throws std::system_error, as do all below.
bool same_user(const UniqueFd& socket);

// kTryAgain: too many descriptors are under way in this user's sockets at the moment.
enum class Sent { kYes, kClosed, kTryAgain };
Sent send_message(const UniqueFd& socket, std::string_view bytes, std::span<const int> fds);

// Never blocks: nothing if no message has come yet. A closed other end is std::errc::connection_reset.
std::optional<Message> receive_message(const UniqueFd& socket);

// A folder that only this user can enter, opened so that nobody can exchange it under our hands. Throws InvalidArgument
// if it belongs to others or lets them in; makes it if `create`, else it must be there.
UniqueFd open_private_directory(const std::filesystem::path& directory, bool create);

// A socket listening under a name in such a folder. A name left behind by a dead process is taken over; one that a living
// process listens on is InvalidArgument. The name goes with the object.
class ListeningSocket {
 public:
  explicit ListeningSocket(const std::filesystem::path& path, bool create_directory);
  ~ListeningSocket();
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;

  int get() const { return socket_.get(); }
  // A connection that waits; none if there is none.
  std::optional<UniqueFd> accept();

 private:
  UniqueFd directory_;
  std::string name_;
  UniqueFd socket_;
};

// Nothing if nobody listens there (yet).
std::optional<UniqueFd> connect_to(const std::filesystem::path& path, bool create_directory);

}  // namespace fsdp
