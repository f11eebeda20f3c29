// Turns the byte stream of one rank into whole lines that start with the rank's name.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace fsdp {

// A line ends at '\n', or at a '\r' that no '\n' follows (a progress bar that rewrites its line): on a terminal such a line keeps its
// '\r', elsewhere it becomes a line of its own, and an empty one is dropped. Each line is given to the sink in one piece, so
// that the lines of several ranks never mix.
class OutputPrefixer {
 public:
  using Sink = std::function<void(std::string_view line)>;

  // A line longer than this is cut, so that a rank which never ends its line cannot fill the memory.
  static constexpr std::size_t kMaxLineBytes = 1 << 20;

  OutputPrefixer(std::string prefix, bool terminal, Sink sink);

  void feed(std::string_view bytes);
  // The stream is at its end: a last line without '\n' is given one.
  void finish();

 private:
  // Index in pending_ of the next line's end at or after `from`; npos where it is not there yet.
  std::size_t find_end(std::size_t from) const;
  void emit(std::string_view line, char terminator);

  std::string prefix_;
  bool terminal_;
  Sink sink_;
  std::string pending_;
};

}  // namespace fsdp
