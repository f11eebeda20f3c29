#include "comm/tcp_endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using testing::HasSubstr;

std::string endpoint(const std::string& init_method, const Variables& variables = {}, const LaunchIdentity& self = {}) {
  try {
    const TcpEndpoint found = tcp_endpoint(variables, self, init_method);
    return found.file.empty() ? found.host + " " + std::to_string(found.port) : "file " + found.file.string();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

TEST(TcpEndpointTest, InitMethodNamesAHostOrAFile) {
  EXPECT_EQ(endpoint("tcp://node7:29500"), "node7 29500");
  EXPECT_EQ(endpoint("tcp://10.0.0.7:1"), "10.0.0.7 1");
  EXPECT_EQ(endpoint("tcp://[fe80::1]:65535"), "fe80::1 65535");
  EXPECT_EQ(endpoint("file:///shared/run/meet"), "file /shared/run/meet");
  EXPECT_EQ(endpoint("tcp://a:1", {{"MASTER_ADDR", "b"}, {"MASTER_PORT", "2"}}), "a 1");
}

TEST(TcpEndpointTest, RefusesWhatIsNone) {
  for (const char* method :
       {"tcp://", "tcp://host", "tcp://:29500", "tcp://fe80::1:29500", "tcp://a/b:1", "tcp://[]:1"})
    EXPECT_THAT(endpoint(method), HasSubstr("expected tcp://host:port")) << method;
  for (const char* method :
       {"tcp://host:", "tcp://host:0", "tcp://host:65536", "tcp://host:1x", "tcp://host:-1", "tcp://host: 1"})
    EXPECT_THAT(endpoint(method), HasSubstr("expected a port from 1 to 65535")) << method;
  for (const char* method : {"file://", "file://relative", "file:///folder/"})
    EXPECT_THAT(endpoint(method), HasSubstr("expected file:///path")) << method;
  for (const char* method : {"udp://host:1", "host:29500", "env:"})
    EXPECT_THAT(endpoint(method), HasSubstr("expected env://, tcp://host:port or file:///path")) << method;
}

TEST(TcpEndpointTest, TheVariablesNameRankZero) {
  const Variables variables{{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29500"}};
  EXPECT_EQ(endpoint("", variables), "node7 29500");
  EXPECT_EQ(endpoint("env://", variables), "node7 29500");
  // torchrun's agent listens on MASTER_PORT itself.
  Variables agent = variables;
  agent["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(endpoint("", agent), "node7 29501");
  agent["FSDP_MASTER_PORT"] = "7000";
  EXPECT_EQ(endpoint("", agent), "node7 7000");
  EXPECT_THAT(endpoint("", {{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "x"}}),
              HasSubstr("MASTER_PORT: expected a port"));
  EXPECT_THAT(endpoint("", {{"MASTER_ADDR", "node7"}}), HasSubstr("set MASTER_ADDR to a name"));
  EXPECT_THAT(endpoint("", {}), HasSubstr("does not know where rank 0 is"));
}

TEST(TcpEndpointTest, AStepOfSrunHasAFirstHostAndAPortOfItsOwn) {
  const Variables nodes{{"SLURM_STEP_NODELIST", "node[003-005]"}};
  const LaunchIdentity first{.launcher = "srun", .job = "17/0/"}, second{.launcher = "srun", .job = "17/1/"};
  EXPECT_THAT(endpoint("", nodes, first), testing::MatchesRegex("node003 [12][0-9]{4}"));
  EXPECT_EQ(endpoint("", nodes, first), endpoint("", nodes, first));
  EXPECT_NE(endpoint("", nodes, first), endpoint("", nodes, second));
  EXPECT_THAT(endpoint("", nodes, {.launcher = "Open MPI"}), HasSubstr("(from Open MPI) does not know"));
}

TEST(FirstHostTest, OfListsAsSlurmWritesThem) {
  EXPECT_EQ(first_host("login"), "login");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("node[003-005,9],login"), "node003");
  EXPECT_EQ(first_host("node[7,9]"), "node7");
  EXPECT_EQ(first_host("n[1-3]-ib,x"), "n1-ib");
  EXPECT_EQ(first_host("rack[2-3]n[08-11]"), "rack2n08");
  for (const char* junk : {"", ",a", "n[", "n[]", "n[1", "n[-2]", "n]", "a b", "n[1]["})
    EXPECT_THROW(first_host(junk), InvalidArgument) << junk;
}

}  // namespace
}  // namespace fsdp
