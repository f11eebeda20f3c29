#include "cli/doctor_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/doctor_gpu_rules.h"

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20, kGiB = std::uint64_t{1} << 30;

// Whatever is wrong says why it matters and what to do.
void expect(const Finding& finding, Verdict verdict, const std::string& text) {
  EXPECT_EQ(finding.verdict, verdict) << to_text(finding);
  EXPECT_THAT(to_text(finding), HasSubstr(text));
  EXPECT_EQ(finding.why.empty(), verdict == Verdict::kOk) << to_text(finding);
  EXPECT_EQ(finding.remedy.empty(), verdict == Verdict::kOk) << to_text(finding);
}

TEST(DoctorRulesTest, Shm) {
  expect(judge_shm({}), Verdict::kWarn, "no /dev/shm");
  expect(judge_shm({true, 64 * kMiB, 64 * kMiB}), Verdict::kWarn, "--shm-size=1g");
  expect(judge_shm({true, kGiB, 10 * kMiB}), Verdict::kWarn, "nearly full");
  expect(judge_shm({true, kGiB, kGiB}), Verdict::kOk, "1.0 GiB in /dev/shm");
}

TEST(DoctorRulesTest, Limits) {
  const auto of = [](const LimitFacts& facts, int ranks, std::size_t i) { return judge_limits(facts, ranks).at(i); };
  expect(of({}, 128, 0), Verdict::kOk, "unlimited at most");
  expect(of({.open_files = 256}, 2, 0), Verdict::kFail, "ulimit -n 65536");
  expect(of({.open_files = 1024}, 4, 0), Verdict::kOk, "1024 at most");
  expect(of({.open_files = 1024}, 100, 0), Verdict::kFail, "100 ranks need about 1856 each");
  expect(of({.processes = 100}, 2, 1), Verdict::kWarn, "threads count as processes");
  expect(of({.locked_bytes = 8 * kMiB}, 2, 2), Verdict::kWarn, "8 MiB at most");
}

TEST(DoctorRulesTest, Memory) {
  expect(judge_memory({.total_bytes = 64 * kGiB, .available_bytes = 60 * kGiB}), Verdict::kOk, "60 GiB of 64 GiB");
  expect(judge_memory({.total_bytes = 64 * kGiB, .available_bytes = 2 * kGiB}), Verdict::kWarn, "other programs");
  expect(judge_memory({.total_bytes = 64 * kGiB, .available_bytes = 60 * kGiB, .cgroup_limit_bytes = 16 * kGiB}),
         Verdict::kWarn, "the cgroup allows 16 GiB");
  expect(judge_memory({.total_bytes = kGiB, .available_bytes = kGiB, .cgroup_limit_bytes = 16 * kGiB}), Verdict::kOk,
         "1.0 GiB");
}

TEST(DoctorRulesTest, Cpu) {
  expect(judge_cpu({.cores = 8, .online = 64, .ranks = 1}), Verdict::kOk, "8 of 64 cores");
  expect(judge_cpu({.cores = 8, .online = 64, .ranks = 8}), Verdict::kWarn,
         "8 rank(s) would run 64 threads on 8 cores");
  expect(judge_cpu({.cores = 8, .online = 64, .ranks = 8}), Verdict::kWarn, "OMP_NUM_THREADS=1, as fsdp run sets it");
  expect(judge_cpu({.cores = 8, .online = 8, .ranks = 8, .omp_threads = 1}), Verdict::kOk, "OMP_NUM_THREADS=1");
  expect(judge_cpu({.cores = 64, .online = 64, .quota = 2, .ranks = 1}), Verdict::kWarn, "a quota of 2.0");
}

TEST(DoctorRulesTest, HostName) {
  HostNameFacts facts{.name = "a", .addresses = {"127.0.1.1"}, .all_loopback = true, .interfaces = {"10.0.0.7"}};
  expect(judge_host_name(facts), Verdict::kWarn, "a is 127.0.1.1; interfaces 10.0.0.7");
  facts.needs_network = true;
  expect(judge_host_name(facts), Verdict::kFail, "put its real address in /etc/hosts");
  facts.chosen = "eth0";
  expect(judge_host_name(facts), Verdict::kOk, "FSDP_SOCKET_IFNAME=eth0");
  expect(judge_host_name({.name = "a", .addresses = {"10.0.0.7"}, .interfaces = {"10.0.0.7"}}), Verdict::kOk,
         "a is 10.0.0.7");
  expect(judge_host_name({.name = "a", .needs_network = true}), Verdict::kFail, "no interface but loopback");
  expect(judge_host_name({.name = "a"}), Verdict::kOk, "a is unknown");
}

TEST(DoctorRulesTest, PortAndKernel) {
  expect(judge_port({29500, "MASTER_PORT", ""}), Verdict::kOk, "MASTER_PORT=29500 is free");
  expect(judge_port({29500, "MASTER_PORT", "pid 812 (train)"}), Verdict::kFail, "held by pid 812 (train)");
  expect(judge_kernel({6, 1, "6.1.0"}), Verdict::kOk, "Linux 6.1.0");
  expect(judge_kernel({5, 4, "5.4.0"}), Verdict::kOk, "page by page");
  expect(judge_kernel({4, 18, "4.18.0", false}), Verdict::kFail, "Linux 5.3");
}

TEST(DoctorRulesTest, Folder) {
  FolderFacts facts{.path = "/runs",
                    .file_system = "ext4",
                    .write_bytes_per_second = 2e9,
                    .free_bytes = 100 * kGiB,
                    .free_inodes = 1'000'000};
  expect(judge_folder(facts), Verdict::kOk, "/runs on ext4, 100 GiB free, writes 2000 MB/s");
  FolderFacts changed = facts;
  changed.error = "mkdir: Permission denied";
  expect(judge_folder(changed), Verdict::kFail, "mkdir: Permission denied");
  changed = facts;
  changed.renames_atomically = false;
  expect(judge_folder(changed), Verdict::kFail, "rename folders as a whole");
  changed = facts;
  changed.excludes = false;
  expect(judge_folder(changed), Verdict::kFail, "one of two win");
  changed = facts;
  changed.syncs_folders = false;
  expect(judge_folder(changed), Verdict::kFail, "sync folders");
  changed = facts;
  changed.file_system = "nfs";
  expect(judge_folder(changed), Verdict::kWarn, "NFS");
  changed = facts;
  changed.free_bytes = 10 * kMiB;
  expect(judge_folder(changed), Verdict::kWarn, "free space");
}

TEST(DoctorRulesTest, Variables) {
  EXPECT_THAT(judge_variables({{"PATH", "/bin"}}), IsEmpty());
  expect(judge_variables({{"NCCL_P2P_DISABLE", "1"}}).at(0), Verdict::kWarn, "NCCL_P2P_DISABLE=1");
  expect(judge_variables({{"NCCL_SOCKET_IFNAME", "eth0"}}).at(0), Verdict::kOk, "NCCL_SOCKET_IFNAME=eth0");
  expect(judge_launch({}), Verdict::kOk, "one rank");
  expect(judge_launch({{"RANK", "1"}}), Verdict::kFail, "RANK=1, WORLD_SIZE unset");
}

TEST(DoctorRulesTest, DifferencesBetweenRanks) {
  const Finding same{Verdict::kOk, "cpu", "8 cores"}, eth0{Verdict::kOk, "variable", "NCCL_SOCKET_IFNAME=eth0"},
      eth1{Verdict::kOk, "variable", "NCCL_SOCKET_IFNAME=eth1"}, few{Verdict::kOk, "cpu", "4 cores"};
  EXPECT_THAT(judge_differences({{same}, {same}}), IsEmpty());
  const auto variables = judge_differences({{same, eth0}, {same, eth1}, {same, eth0}});
  ASSERT_EQ(variables.size(), 1U);
  expect(variables[0], Verdict::kFail, "rank 0, 2: NCCL_SOCKET_IFNAME=eth0 | rank 1: NCCL_SOCKET_IFNAME=eth1");
  const auto unset = judge_differences({{same, eth0}, {same}});
  ASSERT_EQ(unset.size(), 1U) << "set on one rank alone";
  expect(judge_differences({{same}, {few}}).at(0), Verdict::kWarn, "rank 1: 4 cores");
  EXPECT_THAT(judge_differences({{{Verdict::kOk, "memory", "1 GiB"}}, {{Verdict::kOk, "memory", "2 GiB"}}}), IsEmpty());
}

GpuFacts gpu(const std::string& name, std::vector<bool> reaches) {
  return {.name = name, .bus_id = "0000:1b:00.0", .memory_bytes = 80 * kGiB, .reaches = std::move(reaches)};
}

TEST(DoctorGpuRulesTest, WithoutADriverThereIsNothingToSay) {
  const auto findings = judge_gpus({.driver_error = "libcuda.so.1: cannot open"});
  ASSERT_EQ(findings.size(), 1U);
  expect(findings[0], Verdict::kOk, "none that can be used (libcuda.so.1: cannot open)");
  expect(judge_gpus({.driver_cuda = 12040}).at(0), Verdict::kWarn, "docker run --gpus all");
}

TEST(DoctorGpuRulesTest, DriverAndRuntime) {
  GpuSystemFacts facts{
      .driver_cuda = 12040, .runtime_cuda = 12040, .nccl = 22809, .cudnn = 90100, .gpus = {gpu("H200", {true})}};
  expect(judge_gpus(facts).at(1), Verdict::kOk, "supports CUDA 12.4, the runtime is 12.4");
  facts.runtime_cuda = 12080;
  expect(judge_gpus(facts).at(1), Verdict::kWarn, "the runtime is 12.8");
  facts.runtime_cuda = 13000;
  expect(judge_gpus(facts).at(1), Verdict::kFail, "or use libraries for CUDA 12");
  facts.runtime_cuda = 0;
  expect(judge_gpus(facts).at(1), Verdict::kOk, "no libcudart found");
  EXPECT_THAT(to_text(judge_gpus(facts).back()), HasSubstr("NCCL 2.28.9, cuDNN 9.1.0"));
  facts.nccl = 2708;
  EXPECT_THAT(to_text(judge_gpus(facts).back()), HasSubstr("NCCL 2.7.8"));
}

TEST(DoctorGpuRulesTest, ModelsAndReach) {
  GpuSystemFacts facts{.driver_cuda = 13000, .gpus = {gpu("H200", {true, false}), gpu("H100", {false, true})}};
  const auto findings = judge_gpus(facts);
  expect(findings.at(0), Verdict::kWarn, "2 GPU(s): H100, H200, 80 GiB");
  expect(findings.at(2), Verdict::kWarn, "not between GPUs 0-1");
  facts.gpus = {gpu("H200", {true, true}), gpu("H200", {true, true})};
  expect(judge_gpus(facts).at(0), Verdict::kOk, "2 GPU(s): H200");
  expect(judge_gpus(facts).at(2), Verdict::kOk, "every GPU reads");
}

TEST(FindingTest, IsOneLineOrAnObjectOfJson) {
  const Finding finding{Verdict::kFail, "port", "29500 is \"held\"", "why", "what"};
  EXPECT_EQ(to_text(finding), "FAIL port: 29500 is \"held\" -> why -> what");
  EXPECT_EQ(to_text({Verdict::kOk, "cpu", "8 cores"}), "OK   cpu: 8 cores");
  EXPECT_THAT(to_json({finding}), AllOf(HasSubstr("\"verdict\": \"FAIL\""), HasSubstr("29500 is \\\"held\\\"")));
  EXPECT_EQ(worst_of({}), Verdict::kOk);
  EXPECT_EQ(worst_of({finding, {Verdict::kWarn, "", ""}}), Verdict::kFail);
}

}  // namespace
}  // namespace fsdp
