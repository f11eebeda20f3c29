#include "cli/output_prefixer.h"

#include <utility>

namespace fsdp {

OutputPrefixer::OutputPrefixer(std::string prefix, bool terminal, Sink sink)
    : prefix_(std::move(prefix)), terminal_(terminal), sink_(std::move(sink)) {}

std::size_t OutputPrefixer::find_end(std::size_t from) const {
  const auto end = pending_.find_first_of("\r\n", from);
  // Whether a '\r' ends the line by itself shows only with the byte after it.
  if (end != std::string::npos && pending_[end] == '\r' && end + 1 == pending_.size()) return std::string::npos;
  return end;
}

void OutputPrefixer::feed(std::string_view bytes) {
  const auto searched = pending_.empty() ? 0 : pending_.size() - 1;
  pending_.append(bytes);
  std::size_t begin = 0;
  for (auto end = find_end(searched); end != std::string::npos; end = find_end(begin)) {
    const std::string_view line(pending_.data() + begin, end - begin);
    const bool rewritten = pending_[end] == '\r' && pending_[end + 1] != '\n';
    if (!rewritten) {
      emit(line, '\n');
    } else if (!line.empty()) {
      emit(line, terminal_ ? '\r' : '\n');
    }
    begin = end + (pending_[end] == '\r' && !rewritten ? 2 : 1);
  }
  pending_.erase(0, begin);
  while (pending_.size() > kMaxLineBytes) {
    emit(std::string_view(pending_).substr(0, kMaxLineBytes), '\n');
    pending_.erase(0, kMaxLineBytes);
  }
}

void OutputPrefixer::finish() {
  if (pending_.ends_with('\r')) pending_.pop_back();
  if (!pending_.empty()) emit(pending_, '\n');
  pending_.clear();
}

void OutputPrefixer::emit(std::string_view line, char terminator) {
  std::string text;
  text.reserve(prefix_.size() + line.size() + 1);
  text.append(prefix_).append(line).push_back(terminator);
  sink_(text);
}

}  // namespace fsdp
