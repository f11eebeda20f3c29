#include "checkpoint/safetensors.h"

#include <cstring>

#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

SafetensorsHeader read_back(std::string bytes, std::uint64_t file_bytes) {
  bytes.resize(file_bytes, '\1');
  return read_safetensors_header(file_bytes, [&](std::uint64_t offset, std::span<std::byte> out) {
    std::memcpy(out.data(), bytes.data() + offset, out.size());
  });
}

std::vector<SafetensorsTensor> tensors() {
  return {{"b", DType::kBFloat16, {3}}, {"flags", DType::kBool, {5}},      {"a", DType::kBFloat16, {2, 2}},
          {"long", DType::kInt64, {}},  {"none", DType::kFloat32, {0, 4}}, {"w", DType::kFloat32, {2, 3}}};
}

TEST(SafetensorsTest, ReadsBackWhatItLaidOut) {
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"note", "quotes \" and\nlines"}};
  const SafetensorsLayout layout = lay_out_safetensors(tensors(), metadata);
  const SafetensorsHeader header = read_back(layout.head, layout.file_bytes);
  EXPECT_EQ(header.metadata, metadata);
  EXPECT_EQ(header.data_begin, layout.head.size());
  ASSERT_EQ(header.tensors.size(), layout.tensors.size());
  for (const SafetensorsTensor& read : header.tensors) {
    bool found = false;
    for (const SafetensorsTensor& written : layout.tensors) {
      if (written.name != read.name) continue;
      found = true;
      EXPECT_EQ(read.dtype, written.dtype);
      EXPECT_EQ(read.shape, written.shape);
      EXPECT_EQ(read.begin, written.begin);
      EXPECT_EQ(read.end, written.end);
    }
    EXPECT_TRUE(found) << read.name;
  }
}

TEST(SafetensorsTest, OrdersByFallingDtypeSizeThenName) {
  const SafetensorsLayout layout = lay_out_safetensors(tensors(), {});
  std::vector<std::string> names;
  for (const std::size_t i : layout.order) names.push_back(layout.tensors[i].name);
  EXPECT_EQ(names, (std::vector<std::string>{"long", "none", "w", "a", "b", "flags"}));
}

TEST(SafetensorsTest, AlignsDataToPagesAndTensorsToTheirElements) {
  for (std::size_t name_bytes = 1; name_bytes < 4000; name_bytes += 97) {
    auto list = tensors();
    list.push_back({std::string(name_bytes, 'n'), DType::kFloat64, {1}});
    const SafetensorsLayout layout = lay_out_safetensors(list, {});
    EXPECT_EQ(layout.head.size() % 4096, 0U);
    for (const SafetensorsTensor& tensor : layout.tensors) {
      EXPECT_EQ(tensor.begin % size_of(tensor.dtype), 0U) << tensor.name;
    }
  }
}

TEST(SafetensorsTest, WritesTheBytesOfTheFormat) {
  const SafetensorsLayout layout = lay_out_safetensors({{"w", DType::kFloat32, {2, 3}}}, {{"format", "pt"}});
  const std::string metadata = R"("__metadata__":{"format":"pt"})";
  const std::string json = "{" + metadata + R"(,"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})";
  EXPECT_EQ(layout.head, std::string("\xf8\x0f\0\0\0\0\0\0", 8) + json + std::string(4088 - json.size(), ' '));
  EXPECT_EQ(layout.file_bytes, 4096U + 24U);
}

TEST(SafetensorsTest, RefusesNamesThatMayNotStandInAFile) {
  for (const std::string& name : {std::string(), std::string("__metadata__"), std::string("a\nb"),
                                  std::string(4097, 'x'), std::string("\xff\xfe")}) {
    EXPECT_THROW(lay_out_safetensors({{name, DType::kFloat32, {1}}}, {}), CheckpointError) << name.substr(0, 20);
  }
}

}  // namespace
}  // namespace fsdp
