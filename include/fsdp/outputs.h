// What a function over tensors may return, and its tensors one by one: a tensor, a vector or a tuple of them.
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fsdp::detail {

template <class T>
struct Outputs;
template <>
struct Outputs<at::Tensor> {
  static std::vector<at::Tensor> pack(at::Tensor output) { return {std::move(output)}; }
  static at::Tensor unpack(std::vector<at::Tensor> outputs) { return std::move(outputs.front()); }
};
template <>
struct Outputs<std::vector<at::Tensor>> {
  static std::vector<at::Tensor> pack(std::vector<at::Tensor> outputs) { return outputs; }
  static std::vector<at::Tensor> unpack(std::vector<at::Tensor> outputs) { return outputs; }
};
template <class... Tensors>
struct Outputs<std::tuple<Tensors...>> {
  static std::vector<at::Tensor> pack(const std::tuple<Tensors...>& outputs) {
    return std::apply([](const auto&... output) { return std::vector<at::Tensor>{output...}; }, outputs);
  }
  static std::tuple<Tensors...> unpack(const std::vector<at::Tensor>& outputs) {
    return unpack(outputs, std::index_sequence_for<Tensors...>());
  }

 private:
  template <std::size_t... index>
  static std::tuple<Tensors...> unpack(const std::vector<at::Tensor>& outputs, std::index_sequence<index...>) {
    return {outputs[index]...};
  }
};

}  // namespace fsdp::detail
