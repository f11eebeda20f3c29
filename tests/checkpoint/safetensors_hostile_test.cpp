// Headers made to mislead a reader: each is refused, with its reason.
#include "checkpoint/safetensors.h"

#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

std::string length_of(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((value >> (8 * i)) & 0xff);
  return bytes;
}

std::string file_with(const std::string& json, std::size_t data_bytes = 0) {
  return length_of(json.size()) + json + std::string(data_bytes, '\0');
}

SafetensorsHeader read(const std::string& file) {
  return read_safetensors_header(file.size(), [&](std::uint64_t offset, std::span<std::byte> out) {
    ASSERT_LE(offset + out.size(), file.size()) << "read past the end";
    std::memcpy(out.data(), file.data() + offset, out.size());
  });
}

std::string w(const std::string& fields) { return R"({"w":{)" + fields + "}}"; }

// One tensor of bytes.
std::string u8(const std::string& name, int size, int begin, int end) {
  return fmt::format(R"("{}":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}})", name, size, begin, end);
}
std::string two(const std::string& a, const std::string& b) { return "{" + a + "," + b + "}"; }

std::string repeated(const std::string& text, std::size_t count) {
  std::string all;
  for (std::size_t i = 0; i < count; ++i) all += text;
  return all;
}

struct Hostile {
  const char* name;
  std::string file;
  const char* reason;  // part of the error
};

std::vector<Hostile> framing() {
  const std::string good = R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  return {
      {"empty_file", "", "at least 8 bytes"},
      {"seven_bytes", "1234567", "at least 8 bytes"},
      {"length_over_limit", length_of(100'000'001) + "{}", "longer than the 100000000"},
      {"length_all_ones", length_of(~std::uint64_t{0}) + "{}", "longer than"},
      {"length_wraps_with_8", length_of(~std::uint64_t{0} - 7) + "{}", "longer than"},
      {"length_past_end", length_of(3) + "{}", "past the end of the file"},
      {"length_zero", length_of(0), "ends with something other"},
      {"only_spaces", file_with("     "), "ends with something other"},
      {"leading_space", file_with(" {}"), "first byte"},
      {"byte_order_mark", file_with("\xef\xbb\xbf{}"), "first byte"},
      {"an_array", file_with("[]"), "ends with something other"},
      {"newline_padding", file_with("{}\n"), "ends with something other"},
      {"nul_padding", file_with(std::string("{}\0\0", 4)), "ends with something other"},
      {"text_behind_nul", file_with(std::string("{}\0{}", 5)), "NUL byte"},
      {"second_object", file_with("{}{}"), "not JSON"},
      {"not_utf8", file_with("{\"\xff\":{}}"), "not JSON"},
      {"truncated_json", file_with(R"({"__metadata__":{"a":"b"})"), "not JSON"},
      {"comment", file_with("{/**/}"), "not JSON"},
      {"data_missing", file_with(good, 3), "past the end of the file"},
      {"data_left_over", file_with(good, 5), "expected a file of"},
      {"data_without_tensors", file_with("{}", 1), "expected a file of"},
  };
}

std::vector<Hostile> structure() {
  return {
      {"tensor_is_a_string", file_with(R"({"w":"x"})"), "string where none"},
      {"tensor_is_a_number", file_with(R"({"w":1})"), "number where none"},
      {"tensor_is_an_array", file_with(R"({"w":[]})"), "array where none"},
      {"tensor_is_null", file_with(R"({"w":null})"), "null is not allowed"},
      {"tensor_is_empty", file_with(R"({"w":{}})"), "expected dtype, shape and two"},
      {"no_dtype", file_with(w(R"("shape":[1],"data_offsets":[0,1])"), 1), "expected dtype"},
      {"no_shape", file_with(w(R"("dtype":"U8","data_offsets":[0,1])"), 1), "expected dtype"},
      {"no_offsets", file_with(w(R"("dtype":"U8","shape":[1])"), 1), "expected dtype"},
      {"one_offset", file_with(w(R"("dtype":"U8","shape":[1],"data_offsets":[0])"), 1), "two data_offsets"},
      {"three_offsets", file_with(w(R"("dtype":"U8","shape":[1],"data_offsets":[0,1,2])"), 1), "expected 2 offsets"},
      {"unknown_dtype", file_with(w(R"("dtype":"F128","shape":[1],"data_offsets":[0,16])"), 16), "dtype is not known"},
      {"lower_case_dtype", file_with(w(R"("dtype":"f32","shape":[1],"data_offsets":[0,4])"), 4), "dtype is not known"},
      {"unknown_field", file_with(w(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"x":"y")"), 1), "unknown field"},
      {"unknown_array", file_with(w(R"("strides":[1])")), "unknown field"},
      {"unknown_object", file_with(w(R"("x":{})")), "got an object"},
      {"boolean_field", file_with(w(R"("dtype":true)")), "true and false"},
      {"duplicate_tensor", file_with(two(u8("w", 1, 0, 1), u8("w", 1, 0, 1)), 1), "stands twice"},
      {"duplicate_by_escape", file_with(two(u8("w", 1, 0, 1), u8("\\u0077", 1, 0, 1)), 1), "stands twice"},
      {"duplicate_field", file_with(w(R"("dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,1])"), 1),
       "stands twice"},
      {"duplicate_metadata", file_with(R"({"__metadata__":{"a":"1","a":"2"}})"), "stands twice"},
      {"metadata_twice", file_with(R"({"__metadata__":{},"__metadata__":{}})"), "stands twice"},
      {"metadata_number", file_with(R"({"__metadata__":{"a":1}})"), "number where none"},
      {"metadata_object", file_with(R"({"__metadata__":{"a":{}}})"), "got an object"},
      {"metadata_array", file_with(R"({"__metadata__":{"a":["b"]}})"), "array where none"},
      {"metadata_is_text", file_with(R"({"__metadata__":"a"})"), "string where none"},
      {"empty_name", file_with(R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1), "name is empty"},
      {"nul_in_name", file_with(R"({"a\u0000b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
       "control character"},
      {"newline_in_name", file_with(R"({"a\nb":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
       "control character"},
      {"long_name", file_with("{\"" + std::string(4097, 'n') + "\":{}}"), "longer than 4096"},
      {"deep_array", file_with(w("\"shape\":[[1]]")), "array where none"},
      {"deep_braces", file_with(repeated("{\"a\":", 1'000'000) + repeated("}", 1'000'000)), "got an object"},
      {"deep_brackets", file_with("{\"a\":" + repeated("[", 1'000'000) + repeated("]", 1'000'000) + "}"),
       "array where none"},
  };
}

std::vector<Hostile> numbers() {
  const std::string huge = "18446744073709551615", over = "18446744073709551616";
  return {
      {"negative_size", file_with(w(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"), 1), "negative"},
      {"negative_offset", file_with(w(R"("dtype":"U8","shape":[1],"data_offsets":[-1,0])"), 1), "negative"},
      {"fraction", file_with(w(R"("dtype":"U8","shape":[1.5],"data_offsets":[0,1])"), 1), "not an integer"},
      {"whole_fraction", file_with(w(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])"), 1), "not an integer"},
      {"exponent", file_with(w(R"("dtype":"U8","shape":[1e0],"data_offsets":[0,1])"), 1), "not an integer"},
      {"out_of_range", file_with(w(R"("dtype":"U8","shape":[1e999],"data_offsets":[0,1])"), 1), "not JSON"},
      {"size_over_64_bits", file_with(w(R"("dtype":"U8","shape":[)" + over + R"(],"data_offsets":[0,1])"), 1),
       "not an integer"},
      {"size_over_63_bits", file_with(w(R"("dtype":"U8","shape":[)" + huge + R"(],"data_offsets":[0,1])"), 1),
       "63 bits"},
      {"product_wraps_to_0", file_with(w(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])")),
       "more bytes than 64 bits"},
      {"product_wraps_then_0", file_with(w(R"("dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0])")),
       "more bytes than 64 bits"},
      {"bytes_wrap_to_0", file_with(w(R"("dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,0])")),
       "more bytes than 64 bits"},
      {"span_too_short", file_with(w(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4), "expected 8 bytes"},
      {"span_too_long", file_with(w(R"("dtype":"F32","shape":[2],"data_offsets":[0,12])"), 12), "expected 8 bytes"},
      {"end_before_begin", file_with(w(R"("dtype":"U8","shape":[1],"data_offsets":[5,4])"), 5),
       "end before they begin"},
      {"starts_behind_0", file_with(w(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])"), 2), "gap or an overlap"},
      {"far_past_the_end", file_with(w(R"("dtype":"U8","shape":[1000000],"data_offsets":[0,1000000])"), 1),
       "past the end"},
      {"many_dimensions",
       file_with(w(R"("dtype":"U8","shape":[1)" + repeated(",1", 64) + R"(],"data_offsets":[0,1])"), 1),
       "more than 64 dimensions"},
      {"overlap", file_with(two(u8("a", 4, 0, 4), u8("b", 4, 2, 6)), 6), "gap or an overlap"},
      {"same_bytes", file_with(two(u8("a", 4, 0, 4), u8("b", 4, 0, 4)), 4), "gap or an overlap"},
      {"gap", file_with(two(u8("a", 4, 0, 4), u8("b", 4, 5, 9)), 9), "gap or an overlap"},
      {"empty_in_the_middle", file_with(two(u8("a", 4, 0, 4), u8("b", 0, 2, 2)), 4), "gap or an overlap"},
  };
}

class HostileHeaderTest : public testing::TestWithParam<Hostile> {};

TEST_P(HostileHeaderTest, IsRefusedWithItsReason) {
  try {
    read(GetParam().file);
    FAIL() << "accepted";
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(GetParam().reason));
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
}

void PrintTo(const Hostile& hostile, std::ostream* out) { *out << hostile.name; }
std::string name_of_case(const testing::TestParamInfo<Hostile>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Framing, HostileHeaderTest, testing::ValuesIn(framing()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Structure, HostileHeaderTest, testing::ValuesIn(structure()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Numbers, HostileHeaderTest, testing::ValuesIn(numbers()), name_of_case);

// The table must not pass because everything is refused.
TEST(HostileHeaderTest, AcceptsTheHonestNeighbours) {
  EXPECT_EQ(read(file_with("{}")).tensors.size(), 0U);
  EXPECT_EQ(read(file_with(R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}   )", 4)).tensors.size(), 1U);
  const std::string out_of_order = two(u8("b", 2, 4, 6), R"("a":{"data_offsets":[0,4],"shape":[],"dtype":"F32"})");
  EXPECT_EQ(read(file_with(out_of_order, 6)).tensors.front().name, "a");
  EXPECT_EQ(read(file_with(w(R"("dtype":"U8","shape":[1)" + repeated(",1", 63) + R"(],"data_offsets":[0,1])"), 1))
                .tensors.size(),
            1U);
  EXPECT_EQ(read(file_with("{\"" + std::string(4096, 'n') + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"))
                .tensors.size(),
            1U);
}

}  // namespace
}  // namespace fsdp
