// The secret that the ranks of one job share: who does not have it takes no part.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/launch_environment.h"

namespace fsdp {

using JobToken = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 32>;
using Mac = std::array<std::byte, 32>;

JobToken random_token();
Nonce random_nonce();
// 64 hexadecimal digits.
std::string to_hex(const JobToken& token);
std::optional<JobToken> parse_token(std::string_view hex);

// FSDP_JOB_TOKEN, or the contents of the file that FSDP_JOB_TOKEN_FILE names, which only its owner may be able to read;
// none where neither is set. Throws InvalidArgument for anything but 64 hexadecimal digits, whose text does not repeat
// what was found.
std::optional<JobToken> job_token(const Variables& variables);

// HMAC-SHA-256 (RFC 2104) of the parts, one after the other.
Mac authenticate(const JobToken& token, std::initializer_list<std::span<const std::byte>> parts);
// Takes the same time wherever they differ.
bool are_equal(const Mac& a, const Mac& b);

}  // namespace fsdp
