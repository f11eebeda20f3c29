// Tries one spare dispatch key, the macro FSDP_DISPATCH_KEY, with the LibTorch at hand in the way in which the engine uses it:
// parameters are views of one storage that points nowhere, and the key's fallback gives it bytes for the length of one
// operator. Exits with 0 if output and gradients have the bits of plain tensors; CMake takes the first key that does.
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

namespace {

constexpr auto kKey = c10::DispatchKey::FSDP_DISPATCH_KEY;

// The parameters of one layer: `shard` keeps the bytes, `storage` is what the views share.
struct Unit {
  at::Tensor shard;
  c10::Storage storage;
  int page_ins = 0;

  void page_in() {
    storage.set_data_ptr_noswap(c10::DataPtr(shard.data_ptr(), c10::Device(c10::kCPU)));
    ++page_ins;
  }
  void page_out() { storage.set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::kCPU))); }
};

class Pager final : public c10::OperatorKernel {
 public:
  explicit Pager(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
    if (returns_alias(op)) {
      op.redispatchBoxed(below, stack);
      return;
    }
    unit_->page_in();
    c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
    op.redispatchBoxed(below, stack);
    unit_->page_out();
  }

 private:
  static bool returns_alias(const c10::OperatorHandle& op) {
    for (const auto& result : op.schema().returns()) {
      if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    }
    return false;
  }

  std::shared_ptr<Unit> unit_;
};

at::Tensor keyed_view(const Unit& unit, const at::Tensor& parameter, int64_t offset) {
  auto keys = parameter.key_set().add(kKey);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(unit.storage), keys, parameter.dtype());
  impl->set_sizes_contiguous(parameter.sizes());
  impl->set_storage_offset(offset);
  return at::Tensor(std::move(impl));
}

// Moves the parameters' bytes to a shard and leaves them as views of a storage without any.
void take_over(const std::vector<at::Tensor>& parameters, Unit& unit) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (const auto& parameter : parameters) parts.push_back(parameter.reshape({-1}));
  unit.shard = at::cat(parts);
  unit.storage = at::empty_like(unit.shard).storage();
  int64_t offset = 0;
  for (const auto& parameter : parameters) {
    parameter.set_data(keyed_view(unit, parameter.detach(), offset));
    offset += parameter.numel();
  }
  unit.page_out();
}

// Output and gradients of a layer that uses the weight as it is and through a view.
std::vector<at::Tensor> forward_backward(const at::Tensor& input, const std::vector<at::Tensor>& parameters) {
  const auto hidden = at::linear(input, parameters[0], parameters[1]).relu();
  const auto output = at::matmul(hidden, parameters[0].t().reshape({input.size(1), -1}).t());
  output.square().mean().backward();
  std::vector<at::Tensor> results{output.detach()};
  for (const auto& parameter : parameters) results.push_back(parameter.grad().clone());
  return results;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0;
}

bool probe() {
  at::set_num_threads(1);
  at::manual_seed(0);
  const auto input = at::randn({5, 16});
  std::vector<at::Tensor> parameters{at::randn({16, 16}).requires_grad_(true), at::randn({16}).requires_grad_(true)};
  const auto expected = forward_backward(input, parameters);
  for (auto& parameter : parameters) parameter.mutable_grad().reset();

  // The fallback comes first: replacing a parameter's data already dispatches on the key.
  const auto unit = std::make_shared<Unit>();
  torch::Library library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  library.fallback(
      torch::CppFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(std::make_unique<Pager>(unit))));
  take_over(parameters, *unit);
  const auto found = forward_backward(input, parameters);

  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!same_bits(expected[i], found[i])) return false;
  }
  return unit->page_ins > 0;
}

}  // namespace

int main() {
  try {
    if (probe()) return 0;
    std::fputs("the paged layer differs from the plain one\n", stderr);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
