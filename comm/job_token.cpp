#include "comm/job_token.h"

#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sodium.h>
#include <sys/stat.h>

#include <fsdp/error.h>

#include "comm/private_file.h"
#include "comm/unique_fd.h"

namespace fsdp {
namespace {

constexpr const char* kRemedy = "make one with: openssl rand -hex 32";

unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

void require_sodium() {
  if (::sodium_init() < 0) throw CommunicationError("the system gives no random numbers (sodium_init)");
}

JobToken require_token(std::string_view text, const std::string& where) {
  if (const std::optional<JobToken> token = parse_token(text)) return *token;
  throw InvalidArgument(fmt::format("{}: expected {} hexadecimal digits, got {} characters that are not; {}", where,
                                    2 * sizeof(JobToken), text.size(), kRemedy));
}

std::string read_private_file(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) {
    throw InvalidArgument(fmt::format("FSDP_JOB_TOKEN_FILE: cannot open {}: {}; {} and keep it in a file of mode 600",
                                      path, std::generic_category().message(errno), kRemedy));
  }
  if (!S_ISREG(status.st_mode) || !is_private(status)) {
    throw InvalidArgument(
        fmt::format("FSDP_JOB_TOKEN_FILE: expected {} to be a file of this user that nobody else can read, got mode "
                    "{:o} of user {}; chmod 600 it",
                    path, status.st_mode & 07777, status.st_uid));
  }
  std::string text(128, '\0');
  const ssize_t bytes = ::read(file.get(), text.data(), text.size());
  text.resize(bytes < 0 ? 0 : static_cast<std::size_t>(bytes));
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

template <class Array>
Array random_bytes() {
  require_sodium();
  Array bytes;
  ::randombytes_buf(bytes.data(), bytes.size());
  return bytes;
}

}  // namespace

JobToken random_token() { return random_bytes<JobToken>(); }

Nonce random_nonce() { return random_bytes<Nonce>(); }

std::string to_hex(const JobToken& token) {
  std::string text(2 * token.size() + 1, '\0');
  ::sodium_bin2hex(text.data(), text.size(), raw(token.data()), token.size());
  text.pop_back();
  return text;
}

std::optional<JobToken> parse_token(std::string_view hex) {
  JobToken token;
  std::size_t bytes = 0;
  const bool is_one = hex.size() == 2 * token.size() &&
                      ::sodium_hex2bin(raw(token.data()), token.size(), hex.data(), hex.size(), nullptr, &bytes,
                                       nullptr) == 0 &&
                      bytes == token.size();
  return is_one ? std::optional(token) : std::nullopt;
}

std::optional<JobToken> job_token(const Variables& variables) {
  if (const auto text = variables.find("FSDP_JOB_TOKEN"); text != variables.end())
    return require_token(text->second, "FSDP_JOB_TOKEN");
  if (const auto path = variables.find("FSDP_JOB_TOKEN_FILE"); path != variables.end())
    return require_token(read_private_file(path->second), "FSDP_JOB_TOKEN_FILE " + path->second);
  return std::nullopt;
}

Mac authenticate(const JobToken& token, std::initializer_list<std::span<const std::byte>> parts) {
  require_sodium();
  crypto_auth_hmacsha256_state state;
  ::crypto_auth_hmacsha256_init(&state, raw(token.data()), token.size());
  for (const auto part : parts) ::crypto_auth_hmacsha256_update(&state, raw(part.data()), part.size());
  Mac mac;
  ::crypto_auth_hmacsha256_final(&state, raw(mac.data()));
  return mac;
}

bool are_equal(const Mac& a, const Mac& b) { return ::sodium_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace fsdp
