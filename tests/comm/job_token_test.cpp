#include "comm/job_token.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fsdp/error.h>

#include "tests/comm/rank_processes.h"

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string error_of(const Variables& variables) {
  try {
    return job_token(variables) ? "a token" : "none";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

TEST(JobTokenTest, ComesFromTheVariableOrAPrivateFile) {
  const JobToken token = random_token();
  EXPECT_NE(token, random_token());
  EXPECT_FALSE(job_token({}));
  EXPECT_EQ(job_token({{"FSDP_JOB_TOKEN", to_hex(token)}}), token);
  const PrivateFolder folder;
  const std::string path = folder.path() / "token";
  std::ofstream(path) << to_hex(token) << "\n";
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(job_token({{"FSDP_JOB_TOKEN_FILE", path}}), token);
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  EXPECT_THAT(error_of({{"FSDP_JOB_TOKEN_FILE", path}}), AllOf(HasSubstr("got mode 640"), HasSubstr("chmod 600")));
  EXPECT_THAT(error_of({{"FSDP_JOB_TOKEN_FILE", path + "x"}}), HasSubstr("No such file"));
}

TEST(JobTokenTest, RefusesOtherTextsAndDoesNotRepeatThem) {
  const std::string good = to_hex(random_token());
  std::string no_digit = good;
  no_digit[0] = 'g';
  for (const std::string& text : {std::string(), std::string("secret"), good.substr(1), good + "0", no_digit})
    EXPECT_THAT(error_of({{"FSDP_JOB_TOKEN", text}}),
                AllOf(HasSubstr("expected 64 hexadecimal digits"), HasSubstr("openssl rand -hex 32"),
                      Not(HasSubstr(text.empty() ? "secret" : text))));
}

std::vector<std::byte> to_bytes(const char* text) {
  std::vector<std::byte> bytes(std::strlen(text));
  std::memcpy(bytes.data(), text, bytes.size());
  return bytes;
}

// RFC 4231's keys are not of this length; the value is of Python's hmac module.
TEST(JobTokenTest, AuthenticatesWithHmacSha256) {
  JobToken token;
  std::fill(token.begin(), token.end(), std::byte{0x0b});
  const auto whole = to_bytes("Hi There"), first = to_bytes("Hi "), second = to_bytes("There");
  const Mac mac = authenticate(token, {whole});
  EXPECT_EQ(to_hex(mac), "198a607eb44bfbc69903a0f1cf2bbdc5ba0aa3f3d9ae3c1c7a3b1696a0b68cf7");
  EXPECT_TRUE(are_equal(mac, authenticate(token, {first, second})));
  token[31] = std::byte{0x0c};
  EXPECT_FALSE(are_equal(mac, authenticate(token, {whole})));
}

}  // namespace
}  // namespace fsdp
