#include "comm/backend_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using testing::HasSubstr;

LaunchIdentity ranks(int world_size, int local_world_size, const char* launcher = "torchrun") {
  return {
      .rank = 0, .world_size = world_size, .local_rank = 0, .local_world_size = local_world_size, .launcher = launcher};
}

BackendChoice chosen(const LaunchIdentity& self, bool is_met_elsewhere = false, const Variables& variables = {}) {
  return choose_backend("auto", variables, self, is_met_elsewhere);
}

TEST(BackendChoiceTest, AutoIsShmOnOneHostAndTcpOnSeveral) {
  EXPECT_EQ(chosen(ranks(4, 4)).backend, "shm");
  EXPECT_EQ(chosen(ranks(4, 4)).reason, "all 4 ranks are on this host (from torchrun)");
  EXPECT_EQ(chosen(ranks(4, 2)).backend, "tcp");
  EXPECT_EQ(chosen(ranks(4, 2)).reason, "ranks are on several hosts: 2 of 4 on this one (from torchrun)");
  EXPECT_EQ(chosen(ranks(1, 1, "")).backend, "shm");
  EXPECT_EQ(chosen(ranks(1, 1, "")).reason, "one rank");
  EXPECT_EQ(chosen(ranks(4, -1, "PMI")).backend, "shm");
  EXPECT_THAT(chosen(ranks(4, -1, "PMI")).reason, HasSubstr("(from PMI) does not say"));
}

// Who names a place by hand may have other hosts in mind; who is told that all ranks are here has not.
TEST(BackendChoiceTest, APlaceThatTheProgramNamesIsTcpUnlessAllRanksAreKnownToBeHere) {
  EXPECT_EQ(chosen(ranks(4, 4, ""), true).backend, "tcp");
  EXPECT_EQ(chosen(ranks(4, -1, "PMI"), true).backend, "tcp");
  EXPECT_EQ(chosen(ranks(4, 4), true).backend, "shm");
}

TEST(BackendChoiceTest, WhatIsAskedForWinsOverTheVariableAndThatOverAuto) {
  const Variables tcp{{"FSDP_BACKEND", "tcp"}};
  EXPECT_EQ(chosen(ranks(2, 2), false, tcp).backend, "tcp");
  EXPECT_EQ(chosen(ranks(2, 2), false, tcp).reason, "FSDP_BACKEND");
  EXPECT_EQ(choose_backend("shm", tcp, ranks(2, 2), false).backend, "shm");
  EXPECT_EQ(choose_backend("shm", tcp, ranks(2, 2), false).reason, "InitOptions::backend");
  EXPECT_EQ(chosen(ranks(2, 2), false, {{"FSDP_BACKEND", "auto"}}).backend, "shm");
}

TEST(BackendChoiceTest, RefusesWhatIsNotKnownOrCannotBe) {
  const auto error_of = [](const std::string& asked, const Variables& variables, const LaunchIdentity& self) {
    try {
      return "chose " + choose_backend(asked, variables, self, false).backend;
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
  };
  EXPECT_THAT(error_of("smoke", {}, ranks(2, 2)),
              HasSubstr("InitOptions::backend: expected auto, shm or tcp, got \"smoke\""));
  EXPECT_THAT(error_of("thread", {}, ranks(2, 2)), HasSubstr("run_ranks in <fsdp/testing.h>"));
  EXPECT_THAT(error_of("auto", {{"FSDP_BACKEND", ""}}, ranks(2, 2)), HasSubstr("FSDP_BACKEND: expected"));
  EXPECT_THAT(error_of("shm", {}, ranks(4, 2)),
              HasSubstr("expected all ranks on one host, got 2 of 4 here (from torchrun)"));
}

}  // namespace
}  // namespace fsdp
