#include "checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

#include "checkpoint/xxh3.h"

namespace fsdp {
namespace {

using testing::HasSubstr;

Manifest example() {
  Manifest manifest;
  manifest.save_id = "0123456789abcdef";
  manifest.step = 120;
  manifest.world_size = 2;
  manifest.library_version = "0.1.0";
  manifest.tensors = {{"w \"quoted\"", DType::kFloat32, {4, 6}, ShardKind::kParameter},
                      {"s", DType::kInt64, {}, ShardKind::kParameter},
                      {"w \"quoted\"", DType::kFloat32, {0}, ShardKind::kOptimizer}};
  manifest.tied = {{"head", "s"}};
  manifest.files = {{"model/a.safetensors", 4096 + 56, 4096, 1, std::string(32, '0')},
                    {"model/b.safetensors", 4096 + 48, 4096, 2, std::string(32, 'f')}};
  manifest.extents = {{0, 0, {{0, 0}, {2, 6}}, 4096, 4144, 7},
                      {0, 1, {}, 4144, 4152, 8},
                      {1, 0, {{2, 0}, {2, 6}}, 4096, 4144, ~std::uint64_t{0}}};
  manifest.scalars = {{"a", INT64_MAX}, {"b", INT64_MIN}, {"c", 0}};
  return manifest;
}

// The text after a change, with a checksum that fits: what a forger, not a bad disk, would leave.
std::string forged(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  if (at == std::string::npos) throw std::logic_error("nothing to forge: " + from);
  text.replace(at, from.size(), to);
  text.resize(text.rfind("\"manifest_xxh3_128\""));
  return text + "\"manifest_xxh3_128\":\"" + xxh3_128(text) + "\"}\n";
}

std::string refusal(const std::string& text) {
  try {
    parse_manifest(text);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ManifestTest, ReadsBackWhatItWrote) {
  EXPECT_EQ(parse_manifest(to_json(example())), example());
  Manifest empty;
  empty.save_id = "0000000000000000";
  EXPECT_EQ(parse_manifest(to_json(empty)), empty);
}

TEST(ManifestTest, FindsEveryFlippedBitAndEveryCut) {
  const std::string text = to_json(example());
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      ASSERT_THROW(parse_manifest(changed), CheckpointError) << "byte " << i << " bit " << bit;
    }
    ASSERT_THROW(parse_manifest(text.substr(0, i)), CheckpointError) << i;
  }
  EXPECT_THAT(refusal(text.substr(0, 50)), HasSubstr("was cut off"));
  EXPECT_THAT(refusal(text + "\n"), HasSubstr("checksum"));
}

struct Forgery {
  const char *from, *to, *reason;
};

TEST(ManifestTest, RefusesAForgeryWithItsReason) {
  const std::string text = to_json(example());
  const std::vector<Forgery> forgeries = {
      {"\"format_version\":1", "\"format_version\":2", "written by a newer libfsdp"},
      {"\"format_version\":1", "\"format_version\":0", "expected format 1, got 0"},
      {"{\"format_version\":1,", "{", "expected numbers in field format_version"},
      {"\"save_id\":\"0123456789abcdef\"", "\"save_id\":\"0123456789ABCDEF\"", "save_id: expected 16 hex digits"},
      {"\"step\":120", "\"step\":-1", "negative"},
      {"\"step\":120", "\"step\":18446744073709551615", "63 bits"},
      {"\"step\":120", "\"step\":\"120\"", "expected numbers in field step"},
      {"\"world_size\":2", "\"world_size\":0", "at least 1"},
      {"\"world_size\":2", "\"worlds\":2", "expected numbers in field world_size"},
      {"\"step\":120", "\"step\":120,\"more\":1", "unknown field"},
      {"\"tied\":", "\"knots\":", "unknown object"},
      {"\"tied\":{\"head\":\"s\"},\n", "", "expected tensors, tied"},
      {"\"head\":\"s\"", "\"head\":\"t\"", "no parameter is named t"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"F33\"", "dtype is not known"},
      {"\"kind\":\"parameter\"", "\"kind\":\"gradient\"", "kind is not known"},
      {"\"shape\":[4,6]", "\"shape\":[4294967296,4294967296]", "too large"},
      {"\"shape\":[4,6]", "\"shape\":[4,[6]]", "array where none may stand"},
      {"\"kind\":\"parameter\"}", "\"kind\":\"parameter\",\"x\":1}", "unknown field"},
      {"\"name\":\"s\"", "\"name\":\"w \\\"quoted\\\"\"", "stands twice"},
      {"\"name\":\"model/a.safetensors\"", "\"name\":\"model/../a.safetensors\"", "plain file name"},
      {"\"name\":\"model/a.safetensors\"", "\"name\":\"/etc/passwd\"", "plain file name"},
      {"\"name\":\"model/a.safetensors\"", "\"name\":\"model/.a\"", "plain file name"},
      {"\"name\":\"model/b.safetensors\"", "\"name\":\"model/a.safetensors\"", "stands twice"},
      {"\"head_bytes\":4096", "\"head_bytes\":9999", "do not fit"},
      {"{\"file\":\"model/a.safetensors\"", "{\"file\":\"model/c.safetensors\"", "file that is not listed"},
      {"\"tensor\":\"s\"", "\"tensor\":\"t\"", "tensor that is not listed"},
      {"\"offsets\":[2,0]", "\"offsets\":[3,0]", "does not lie in shape"},
      {"\"offsets\":[2,0]", "\"offsets\":[9223372036854775807,0]", "does not lie in shape"},
      {"\"offsets\":[2,0]", "\"offsets\":[2]", "does not lie in shape"},
      {"\"sizes\":[2,6]", "\"sizes\":[0,6]", "does not lie in shape"},
      {"\"bytes\":[4096,4144]", "\"bytes\":[4000,4048]", "do not lie in"},
      {"\"bytes\":[4096,4144]", "\"bytes\":[4144,4096]", "do not lie in"},
      {"\"bytes\":[4096,4144]", "\"bytes\":[4096,4140]", "not those of a box"},
      {"\"bytes\":[4096,4144]", "\"bytes\":[4096]", "expected 2 numbers"},
      {"\"scalars\":{", "\"scalars\":{\"a\":1.5,", "not an integer"},
  };
  for (const auto& [from, to, reason] : forgeries) {
    EXPECT_THAT(refusal(forged(text, from, to)), HasSubstr(reason)) << to;
  }
  EXPECT_EQ(refusal(forged(text, "120", "121")), "accepted");
}

TEST(ManifestTest, FindsHolesAndOverlaps) {
  EXPECT_NO_THROW(check_coverage(example()));
  const auto refused = [](auto change) {
    Manifest manifest = example();
    change(manifest);
    try {
      check_coverage(manifest);
    } catch (const CheckpointError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refused([](Manifest& m) { m.extents.pop_back(); }), HasSubstr("hold 12 elements, shape [4, 6] has 24"));
  EXPECT_THAT(refused([](Manifest& m) { m.extents.push_back(m.extents[1]); }),
              HasSubstr("hold more than the 1 elements"));
  EXPECT_THAT(refused([](Manifest& m) {
                m.extents[2].box.offsets = {1, 0};
              }),
              HasSubstr("boxes at [0, 0] and [1, 0] overlap"));
}

TEST(ManifestTest, MergesWhatTheRanksWrote) {
  Manifest whole = example(), first = example(), second = example();
  first.files.pop_back();
  first.extents.pop_back();
  first.tensors.pop_back();
  second.files.erase(second.files.begin());
  second.extents.erase(second.extents.begin(), second.extents.begin() + 2);
  second.extents[0].file = 0;
  std::swap(second.tensors[0], second.tensors[2]);
  second.extents[0].tensor = 2;
  EXPECT_EQ(merge({first, second}), whole);
}

TEST(ManifestTest, RefusesRanksThatDisagreeOnATensor) {
  Manifest other = example();
  other.tensors[0].shape = {6, 4};
  EXPECT_THROW(merge({example(), other}), CheckpointError);
}

}  // namespace
}  // namespace fsdp
