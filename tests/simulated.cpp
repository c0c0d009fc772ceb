// A simulated accelerator for tests: the device `sim`. Each operation runs torch's kernel for CPUs
// on memory that nothing else can touch: its addresses are none of the process's, but for a bit.
//
// Errors: tensors of the CPU (but for scalars) beside those of the device,
// tensors of both devices; who reads an address of the device ends with a segmentation fault. Counted: values that are read by the host, copies and bytes that
// cross, operations.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

c10::DeviceIndex devices = 2;  // of this machine
constexpr auto KIND = c10::DeviceType::PrivateUse1;

std::atomic<int64_t> reads{0}, to_host{0}, to_device{0}, bytes_to_host{0}, bytes_to_device{0},
    operations{0};
thread_local c10::DeviceIndex current = 0;

// ---- memory

constexpr uintptr_t OURS = uintptr_t{1} << 62;  // no address of a process has this bit

void* of_device(const void* host) {
  return host ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | OURS) : nullptr;
}
void* of_host(const void* device) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device) & ~OURS);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* found = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    TORCH_CHECK(found || !bytes, "sim: out of memory");
    return {of_device(found), found, &std::free, c10::Device(KIND, current)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(of_host(to), of_host(from), bytes);
  }
};
Memory memory;

void resize(const c10::Storage& storage, size_t bytes) {
  c10::OptionalDeviceGuard guard(storage.device());
  auto made = memory.allocate(bytes);
  if (const auto kept = std::min(storage.nbytes(), bytes))
    std::memcpy(of_host(made.get()), of_host(storage.data()), kept);
  storage.set_data_ptr_noswap(std::move(made));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device to) const override { uncheckedSetDevice(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) current = to.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  // All is done when a call returns: there is one stream, and it is always empty.
  c10::Stream getStream(c10::Device on) const override { return c10::Stream(c10::Stream::DEFAULT, on); }
  c10::Stream getNewStream(c10::Device on, int) const override {
    return c10::Stream(c10::Stream::DEFAULT, on);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return c10::Stream(c10::Stream::DEFAULT, to.device());
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override { *event = &devices; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// Random numbers are its own: kernels for CPUs draw from this one.
const at::Generator& generator() {
  static const at::Generator made = at::detail::createCPUGenerator();
  return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex to) const override {
    if (to >= 0) current = to;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    auto before = current;
    setCurrentDevice(to);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return exchangeDevice(to);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize(storage, bytes);
  }
};

// ---- what is of the device, as the CPU's kernels take it: the same memory

at::Tensor shown(const at::Tensor& ours) {
  auto* from = ours.unsafeGetTensorImpl();
  const auto& store = ours.storage();
  c10::DataPtr pointer{of_host(store.mutable_data()), c10::Device(c10::kCPU)};
  c10::Storage seen(c10::Storage::use_byte_size_t{}, store.nbytes(), std::move(pointer),
                    c10::GetCPUAllocator(), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(seen), c10::DispatchKeySet(c10::DispatchKey::CPU), ours.dtype());
  auto* to = made.unsafeGetTensorImpl();
  to->set_sizes_and_strides(from->sym_sizes(), from->sym_strides(), from->sym_storage_offset());
  if (ours.is_conj()) made._set_conj(true);
  if (ours.is_neg()) made._set_neg(true);
  if (from->is_wrapped_number()) to->set_wrapped_number(true);
  return made;
}

at::Tensor hidden(const at::Tensor& made, c10::DeviceIndex index) {
  auto whole = made;
  auto* keeps = new at::Tensor(whole);  // its memory lives as long as the device's tensor
  auto& store = whole.storage();
  c10::DataPtr pointer{
      of_device(store.mutable_data()), keeps, [](void* held) { delete static_cast<at::Tensor*>(held); },
      c10::Device(KIND, index)};
  c10::Storage ours(
      c10::Storage::use_byte_size_t{}, store.nbytes(), std::move(pointer), &memory,
      /*resizable=*/true);
  auto found = at::detail::make_tensor<c10::TensorImpl>(
      std::move(ours), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), made.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(
      made.sym_sizes(), made.sym_strides(), made.sym_storage_offset());
  return found;
}

// ---- every other operation

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++operations;
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // ours, and as it is shown
  std::optional<c10::Device> on;
  bool beside = false;
  auto show = [&](const at::Tensor& given) -> at::Tensor {
    if (!given.defined()) return given;
    if (given.device().type() != KIND) {
      beside |= given.dim() > 0;
      return given;
    }
    TORCH_CHECK(!on || *on == given.device(), op.operator_name(), ": tensors of ", *on, " and ",
                given.device());
    on = given.device();
    for (auto& pair : pairs)
      if (pair.first.is_same(given)) return pair.second;
    pairs.emplace_back(given, shown(given));
    return pairs.back().second;
  };
  std::optional<c10::Device> asked;
  for (size_t n = 0; n < count; ++n) {
    auto& value = (*stack)[first + n];
    if (value.isTensor()) {
      value = show(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(show(each));
      value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> each : value.toOptionalTensorList())
        list.push_back(each ? std::optional<at::Tensor>(show(*each)) : each);
      value = list;
    } else if (value.isNone() && schema.arguments()[n].name() == "generator" && on) {
      value = generator();
    } else if (value.isDevice()) {
      asked = value.toDevice();
      if (asked->type() == KIND) value = c10::Device(c10::kCPU);
    }
  }
  const auto name = op.operator_name().name;
  TORCH_CHECK(!(beside && on), name, ": tensors of the CPU beside tensors of sim");
  const bool wraps = asked ? asked->type() == KIND : on.has_value();
  const auto index = asked && asked->has_index() ? asked->index() : on ? on->index() : current;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto hide = [&](const at::Tensor& made) -> at::Tensor {
    if (!made.defined()) return made;
    for (auto& [ours, as_shown] : pairs) {
      if (made.is_same(as_shown)) return ours;
      if (made.numel() && made.storage().data() == as_shown.storage().data())
        return ours.as_strided(made.sizes(), made.strides(), made.storage_offset());
    }
    return wraps ? hidden(made, index) : made;
  };
  for (auto& [ours, as_shown] : pairs) {  // what was to be filled may have got another size
    const bool grown = as_shown.storage().data() != of_host(ours.storage().data());
    if (grown || as_shown.sizes() != ours.sizes() || as_shown.strides() != ours.strides()) {
      auto taken = grown ? hidden(as_shown, ours.device().index()) : ours;
      auto* to = ours.unsafeGetTensorImpl();
      if (grown) to->set_storage_keep_dtype(taken.storage());
      to->set_sizes_and_strides(as_shown.sym_sizes(), as_shown.sym_strides(),
                                as_shown.sym_storage_offset());
    }
  }
  const auto begin = stack->size() - schema.returns().size();
  for (size_t n = begin; n < stack->size(); ++n) {
    auto& value = (*stack)[n];
    if (value.isTensor()) {
      value = hide(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(hide(each));
      value = c10::List<at::Tensor>(list);
    }
  }
}

// ---- operations that make tensors, look at memory otherwise, or cross

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> type,
                 std::optional<c10::Layout>, std::optional<c10::Device> on, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  ++operations;
  c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_generic(size, &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   type.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                         std::optional<c10::Device> on, std::optional<bool>) {
  ++operations;
  c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      type.value_or(c10::get_default_dtype_as_scalartype()));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::cpu::view(self, size);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::_reshape_alias(self, size, stride);
}
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const auto bytes = (self.storage_offset() + self.numel()) * self.dtype().itemsize();
  if (self.storage().nbytes() < bytes) resize(self.storage(), bytes);
  return self;
}
at::Tensor& set_(at::Tensor& self) {
  return self.set_(at::empty({0}, self.options()).storage(), 0, {0}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return self.set_(from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
at::Tensor& set_storage(at::Tensor& self, c10::Storage from) {
  const auto size = static_cast<int64_t>(from.nbytes() / self.dtype().itemsize());
  return self.set_(std::move(from), 0, {size}, {1});
}
at::Tensor& set_storage_offset(at::Tensor& self, c10::Storage from, int64_t offset,
                               c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(from));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const bool ours = from.device().type() == KIND, theirs = to.device().type() == KIND;
  if (ours != theirs) {
    ++(ours ? to_host : to_device);
    (ours ? bytes_to_host : bytes_to_device) += static_cast<int64_t>(from.nbytes());
  } else {
    ++operations;
  }
  (theirs ? shown(to) : to).copy_(ours ? shown(from) : from);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

c10::Scalar read_value(const at::Tensor& self) {
  ++reads;
  return at::_local_scalar_dense(shown(self));
}

// torch asks every device but its own for convolutions by these names.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  ++operations;
  std::optional<at::Tensor> added;
  if (bias && bias->defined()) added = shown(*bias);
  auto made = at::convolution_symint(shown(input), shown(weight), added, stride, padding, dilation,
                                     transposed, output_padding, groups);
  return hidden(made, input.device().index());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  ++operations;
  const auto channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto made = at::convolution_backward_symint(
      shown(grad), shown(input), shown(weight), c10::SymIntArrayRef(&channels, 1), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  const auto index = input.device().index();
  auto hide = [&](const at::Tensor& one) { return one.defined() ? hidden(one, index) : one; };
  return {hide(std::get<0>(made)), hide(std::get<1>(made)), hide(std::get<2>(made))};
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool>) {
  ++operations;
  const auto index = input.device().index();
  auto from = shown(input);
  auto mask = at::empty_like(from).bernoulli_(1 - p, generator());
  return {hidden(from * mask.div(1 - p), index), hidden(mask.to(at::kBool), index)};
}

int64_t counted(const std::string& what) {
  if (what == "reads") return reads;
  if (what == "copies to host") return to_host;
  if (what == "copies to device") return to_device;
  if (what == "bytes to host") return bytes_to_host;
  if (what == "bytes to device") return bytes_to_device;
  TORCH_CHECK(what == "operations", "no count of ", what);
  return operations;
}
void seed(int64_t number) {
  auto made = generator();
  std::lock_guard<std::mutex> lock(made.mutex());
  made.set_current_seed(static_cast<uint64_t>(number));
}
at::Tensor state() { return generator().get_state(); }
void set_state(const at::Tensor& state) {
  auto made = generator();
  made.set_state(state);
}
// The same memory, for a process group: whoever moves it may outlive the tensor.
at::Tensor lent(const at::Tensor& ours) {
  auto made = shown(ours);
  auto* keeps = new at::Tensor(ours.detach());
  c10::DataPtr pointer{of_host(ours.storage().mutable_data()), keeps,
                       [](void* held) { delete static_cast<at::Tensor*>(held); },
                       c10::Device(c10::kCPU)};
  made.storage().set_data_ptr_noswap(std::move(pointer));
  return made;
}
void have(int64_t count) { devices = static_cast<c10::DeviceIndex>(count); }
int64_t device_now() { return current; }
void choose(int64_t index) { current = static_cast<c10::DeviceIndex>(index); }

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(KIND, &memory)

static const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_", set_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_local_scalar_dense", read_value);
}
// As on GPUs: what multiplies matrices does so in the lower precision.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}
TORCH_LIBRARY(sim, m) {
  m.def("counted(str what) -> int", counted);
  m.def("have(int count) -> ()", have);
  m.def("lent(Tensor ours) -> Tensor", lent);
  m.def("device_now() -> int", device_now);
  m.def("choose(int index) -> ()", choose);
  m.def("seed(int number) -> ()", seed);
  m.def("state() -> Tensor", state);
  m.def("set_state(Tensor state) -> ()", set_state);
}
