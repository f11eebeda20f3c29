#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

template <class E>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    EXPECT_EQ(typeid(error), typeid(E));
    return error.what();
  }
  ADD_FAILURE() << "returned";
  return "";
}

void throw_on(int rank, int world_size, const std::function<void()>& thrower) {
  run_ranks(world_size, [&](Context context) {
    if (context.rank() == rank) thrower();
    context.communicator().barrier();
  });
}

TEST(RunRanksTest, RunsTheBodyOncePerRank) {
  std::mutex mutex;
  std::set<int> ranks;
  std::set<std::thread::id> threads;
  run_ranks(4, [&](Context context) {
    const std::lock_guard lock(mutex);
    ranks.insert(context.rank());
    threads.insert(std::this_thread::get_id());
    EXPECT_EQ(context.world_size(), 4);
    EXPECT_EQ(context.backend(), "thread");
    EXPECT_EQ(context.is_main(), context.rank() == 0);
  });
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(threads.size(), 4U);
}

TEST(RunRanksTest, RethrowsTheFirstErrorWithItsRankAndType) {
  EXPECT_EQ(text_of<InvalidArgument>([] { throw_on(2, 4, [] { throw InvalidArgument("no"); }); }), "rank 2: no");
  EXPECT_EQ(text_of<CommunicationError>([] { throw_on(0, 2, [] { throw CommunicationError("no"); }); }), "rank 0: no");
  EXPECT_EQ(text_of<DeviceError>([] { throw_on(1, 2, [] { throw DeviceError("no"); }); }), "rank 1: no");
  EXPECT_EQ(text_of<CheckpointError>([] { throw_on(1, 3, [] { throw CheckpointError("no"); }); }), "rank 1: no");
  EXPECT_EQ(text_of<MemoryError>([] { throw_on(0, 1, [] { throw MemoryError("no"); }); }), "rank 0: no");
}

TEST(RunRanksTest, RethrowsAForeignErrorUnchanged) {
  EXPECT_EQ(text_of<std::out_of_range>([] { throw_on(1, 2, [] { throw std::out_of_range("no"); }); }), "no");
  EXPECT_THROW(throw_on(1, 2, [] { throw 7; }), int);
}

TEST(RunRanksTest, AnErrorOfOneRankEndsTheWaitsOfTheOthersWithItsText) {
  std::atomic<int> told{0};
  EXPECT_THROW(run_ranks(3,
                         [&](Context context) {
                           if (context.rank() == 1) throw std::runtime_error("out of data");
                           try {
                             context.communicator().barrier();
                           } catch (const CommunicationError& error) {
                             EXPECT_THAT(error.what(), HasSubstr("aborted by rank 1: out of data"));
                             told.fetch_add(1);
                             throw;
                           }
                         }),
               std::runtime_error);
  EXPECT_EQ(told.load(), 2);
}

TEST(RunRanksTest, RefusesWhatCannotBe) {
  const auto body = [](Context) { ADD_FAILURE() << "ran"; };
  EXPECT_THAT(text_of<InvalidArgument>([&] { run_ranks(0, body); }), HasSubstr("world size in [1, 128], got 0"));
  EXPECT_THROW(run_ranks(129, body), InvalidArgument);
  EXPECT_THAT(text_of<InvalidArgument>([&] { run_ranks(2, body, {.backend = "gloo"}); }),
              HasSubstr("thread, shm or tcp, got \"gloo\""));
  EXPECT_THROW(run_ranks(2, body, {.timeout = 0ms}), InvalidArgument);
}

TEST(RunRanksTest, RefusesAFaultThatCannotHappen) {
  const auto refusal = [](const Fault& fault) {
    return text_of<InvalidArgument>([&] { run_ranks(2, [](const Context&) {}, {.faults = {fault}}); });
  };
  using Kind = Fault::Kind;
  EXPECT_THAT(
      refusal({.kind = Kind::kNoMemory, .operation = "barrier"}),
      HasSubstr("expected one of allocate, allocate_board for kNoMemory, or \"\" for any of them, got \"barrier\""));
  for (const char* operation : {"barrier", "allocate", "wait_until", "check", "no collective"})
    EXPECT_THAT(
        refusal({.kind = Kind::kCorruption, .operation = operation}),
        HasSubstr("expected one of all_gather, reduce_scatter, all_reduce, broadcast, gather, reduce, read for "));
  EXPECT_THAT(refusal({.operation = "all_gathers"}), HasSubstr("got \"all_gathers\""));
  EXPECT_THAT(refusal({.rank = 2}), HasSubstr("expected -1 (every rank) or one in [0, 2), got 2"));
  EXPECT_THAT(refusal({.rank = -2}), HasSubstr("got -2"));
  EXPECT_THAT(refusal({.after = -1}), HasSubstr("got -1, 1 and 0 ms"));
  EXPECT_THAT(refusal({.count = 0}), HasSubstr("got 0, 0 and 0 ms"));
  EXPECT_THAT(refusal({.count = -2}), HasSubstr("got 0, -2 and 0 ms"));
  EXPECT_THAT(refusal({.delay = -1ms}), HasSubstr("got 0, 1 and -1 ms"));
}

// A fault of any call lets those pass that it cannot happen in.
TEST(RunRanksTest, AFaultOfAnyCallHitsTheFirstThatItCanHappenIn) {
  run_ranks(2,
            [](const Context& context) {
              context.communicator().barrier();
              const std::byte own{4};
              std::array<std::byte, 2> all{};
              context.communicator().all_gather({&own, 1}, all);
              EXPECT_EQ(all[0], context.rank() == 1 ? std::byte{5} : std::byte{4});
              EXPECT_EQ(all[1], std::byte{4});
            },
            {.faults = {{.kind = Fault::Kind::kCorruption, .rank = 1}}});
}

TEST(RunRanksTest, AThrowFaultHitsThePlannedCallsOfThePlannedRank) {
  std::array<std::atomic<int>, 3> passed{};
  const std::string text = text_of<CommunicationError>([&] {
    run_ranks(3,
              [&](Context context) {
                for (int i = 0; i < 5; ++i) {
                  context.communicator().barrier();
                  passed[static_cast<std::size_t>(context.rank())].fetch_add(1);
                }
              },
              {.faults = {{.kind = Fault::Kind::kThrow, .operation = "barrier", .rank = 1, .after = 2}}});
  });
  EXPECT_EQ(text, "rank 1: injected fault in barrier on rank 1, matching call 2");
  EXPECT_EQ(passed[1].load(), 2);
}

TEST(RunRanksTest, ADelayFaultHitsCountCallsAndNoMore) {
  for (const int count : {1, 3, -1}) {
    std::atomic<int> slow{0};
    run_ranks(2,
              [](Context context) {
                for (int i = 0; i < 5; ++i) {
                  context.mean(1);
                  context.communicator().barrier();
                }
              },
              {.faults = {{.operation = "barrier", .rank = 0, .count = count, .delay = 40ms}},
               .on_record = [&](int rank, const CommunicatorRecord& record) {
                 if (rank == 0 && record.operation == "barrier" && record.end_ns - record.begin_ns >= 40'000'000)
                   slow.fetch_add(1);
               }});
    EXPECT_GE(slow.load(), count == -1 ? 5 : count);
    if (count == 1) {
      EXPECT_LT(slow.load(), 5);
    }
  }
}

// As a process that is killed: it says nothing, and the others see it.
TEST(RunRanksTest, ADeathIsSeenByTheOthersAlone) {
  for (const char* backend : {"thread", "tcp"}) {
    std::atomic<int> told{0};
    const std::string text = text_of<CommunicationError>([&] {
      run_ranks(3,
                [&](Context context) {
                  try {
                    for (int i = 0; i < 5; ++i) context.communicator().barrier();
                  } catch (const CommunicationError& error) {
                    if (context.rank() != 1) told.fetch_add(1);
                    throw;
                  }
                },
                {.backend = backend,
                 .faults = {{.kind = Fault::Kind::kDeath, .operation = "barrier", .rank = 1, .after = 2}}});
    });
    EXPECT_THAT(
        text, testing::ContainsRegex("rank [02]: barrier on rank [02]: rank 1 \\(pid [0-9]+\\) died, last in barrier"))
        << backend;
    EXPECT_EQ(told.load(), 2) << backend;
  }
}

TEST(RunRanksTest, ADeathThatNobodyMissesIsNoError) {
  std::atomic<int> ended{0};
  run_ranks(2,
            [&](Context context) {
              if (context.rank() == 1) context.communicator().barrier();
              ended.fetch_add(1);
            },
            {.faults = {{.kind = Fault::Kind::kDeath, .rank = 1}}});
  EXPECT_EQ(ended.load(), 1);
}

TEST(RunRanksTest, ADeathOverShmIsRefused) {
  EXPECT_THAT(text_of<InvalidArgument>([] {
                run_ranks(2, [](Context context) { context.communicator().barrier(); },
                          {.backend = "shm", .faults = {{.kind = Fault::Kind::kDeath, .rank = 1}}});
              }),
              HasSubstr("use backend thread or tcp"));
}

TEST(RunRanksTest, ACorruptionChangesOneBitOfWhatARankGets) {
  run_ranks(
      2,
      [](Context context) {
        const std::byte own[] = {std::byte{6}, std::byte{7}};
        std::array<std::byte, 4> all{};
        for (int call = 0; call < 3; ++call) {
          context.communicator().all_gather(own, all);
          const bool hit = context.rank() == 1 && call == 1;
          EXPECT_EQ(all, (std::array{hit ? std::byte{7} : std::byte{6}, std::byte{7}, std::byte{6}, std::byte{7}}))
              << "rank " << context.rank() << ", call " << call;
        }
      },
      {.faults = {{.kind = Fault::Kind::kCorruption, .operation = "all_gather", .rank = 1, .after = 1}}});
}

TEST(RunRanksTest, NoMemoryOnOneRankIsAnErrorOnAllAndNoMore) {
  for (const char* backend : {"thread", "shm", "tcp"}) {
    std::atomic<int> told{0};
    run_ranks(3,
              [&](Context context) {
                Communicator& communicator = context.communicator();
                for (int call = 0; call < 4; ++call) {
                  try {
                    if (call % 2 == 0) {
                      EXPECT_EQ(communicator.allocate(100)->bytes(), 100U);
                    } else {
                      communicator.allocate_board(3);
                    }
                  } catch (const MemoryError& error) {
                    EXPECT_THAT(error.what(), HasSubstr("bytes per rank failed on rank 2: Cannot allocate memory"));
                    EXPECT_EQ(error.rank(), 2);
                    told.fetch_add(1);
                  }
                }
                communicator.barrier();
              },
              {.backend = backend,
               .faults = {{.kind = Fault::Kind::kNoMemory, .operation = "allocate", .rank = 2, .after = 1},
                          {.kind = Fault::Kind::kNoMemory, .operation = "allocate_board", .rank = 2}}});
    EXPECT_EQ(told.load(), 6) << backend;
  }
}

TEST(RunRanksTest, RecordsEveryCallWithBytesOutputAndLabel) {
  std::mutex mutex;
  std::map<std::string, CommunicatorRecord> records;  // rank 0's last of each operation
  std::array<std::byte, 64> data{};
  const void* gathered = nullptr;
  run_ranks(2,
            [&](Context context) {
              Communicator& communicator = context.communicator();
              std::array<std::byte, 64> own{}, output{};
              if (context.rank() == 0) gathered = output.data();
              const auto segment = communicator.allocate(48);
              const auto board = communicator.allocate_board(3);
              communicator.all_gather(std::span(own).first(16), std::span(output).first(32));
              communicator.reduce_scatter(own.data(), output.data(), 3, DType::kFloat64);
              communicator.all_reduce(own.data(), 7, DType::kFloat32, ReduceOp::kMax);
              communicator.broadcast(own, 1);
              communicator.gather({segment.get(), 0, 24, output.data(), "layers.1"});
              const ReduceInput inputs[] = {{.local = data.data()}, {.local = data.data()}};
              communicator.reduce({.inputs = inputs,
                                   .numel = 5,
                                   .input_dtype = DType::kBFloat16,
                                   .output = output.data(),
                                   .label = "layers.2"});
              communicator.read(*segment, 1, 8, std::span(output).first(9));
              communicator.wait_until([] { return true; }, "nothing");
              communicator.barrier();
            },
            {.on_record = [&](int rank, const CommunicatorRecord& record) {
              EXPECT_LE(record.begin_ns, record.end_ns);
              const std::lock_guard lock(mutex);
              if (rank == 0) records[record.operation] = record;
            }});
  std::map<std::string, std::size_t> bytes;
  for (const auto& [operation, record] : records) bytes[operation] = record.bytes;
  EXPECT_EQ(bytes, (std::map<std::string, std::size_t>{{"allocate", 48},
                                                       {"allocate_board", 24},
                                                       {"all_gather", 32},
                                                       {"reduce_scatter", 24},
                                                       {"all_reduce", 28},
                                                       {"broadcast", 64},
                                                       {"gather", 48},
                                                       {"reduce", 20},
                                                       {"read", 9},
                                                       {"wait_until", 0},
                                                       {"barrier", 0}}));
  EXPECT_EQ(records["gather"].label, "layers.1");
  EXPECT_EQ(records["gather"].output, gathered);
  EXPECT_EQ(records["reduce"].label, "layers.2");
  EXPECT_EQ(records["wait_until"].label, "nothing");
}

}  // namespace
}  // namespace fsdp
