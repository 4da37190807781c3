// Matrix products of PyTorch for C++ without PyTorch's own headers for it, which take a minute to compile: through the C
// functions that PyTorch keeps stable for compiled models (torch/csrc/inductor/aoti_torch). What MKL or oneDNN makes of
// a product is therefore the same as in Python.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include <dlfcn.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "rows.h"

struct ProductFailed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void check(AOTITorchError error) {
    if (error == AOTI_TORCH_SUCCESS) return;
    // What PyTorch says of the last error of this thread, if it is new enough to have kept it
    void* function = dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace");
    if (function == nullptr) throw ProductFailed("this PyTorch does not say why");
    throw ProductFailed(reinterpret_cast<const char* (*)()>(function)());
}

// `batch` matrices [rows, columns], or one; strides in elements
template <class T>
struct View {
    T* data;
    std::int64_t rows, columns, row_stride;
    std::int64_t column_stride = 1;
    std::int64_t batch = 0, batch_stride = 0;  // batch 0: one matrix, of two dimensions

    View transposed() const { return {data, columns, rows, column_stride, row_stride, batch, batch_stride}; }

    View row_range(std::int64_t first, std::int64_t count) const {
        View part = *this;
        part.data += first * row_stride;
        part.rows = count;
        return part;
    }

    View column_range(std::int64_t first, std::int64_t count) const {
        View part = *this;
        part.data += first * column_stride;
        part.columns = count;
        return part;
    }

    // `count` matrices of `tile` rows, one every `step` rows
    View tiles(std::int64_t count, std::int64_t tile, std::int64_t step) const {
        return {data, tile, columns, row_stride, column_stride, count, step * row_stride};
    }
};

// A view as PyTorch wants it, which does not own the memory
class Tensor {
  public:
    template <class T>
    explicit Tensor(const View<T>& view) {
        const std::int64_t sizes[] = {view.batch, view.rows, view.columns};
        const std::int64_t strides[] = {view.batch_stride, view.row_stride, view.column_stride};
        const int skipped = view.batch == 0 ? 1 : 0;
        check(aoti_torch_create_tensor_from_blob(const_cast<std::remove_const_t<T>*>(view.data), 3 - skipped,
                                                 sizes + skipped, strides + skipped, 0, type(view.data),
                                                 aoti_torch_device_type_cpu(), -1, &handle_));
    }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;
    ~Tensor() { aoti_torch_delete_tensor_object(handle_); }
    AtenTensorHandle get() const { return handle_; }

  private:
    static std::int32_t type(const float*) { return aoti_torch_dtype_float32(); }
    static std::int32_t type(const double*) { return aoti_torch_dtype_float64(); }
    static std::int32_t type(const BFloat16*) { return aoti_torch_dtype_bfloat16(); }

    AtenTensorHandle handle_;
};

// out = a · b, of one matrix or of a batch
template <class T>
void multiply(const View<T>& out, const View<const T>& a, const View<const T>& b) {
    if (out.rows == 0 || out.columns == 0) return;
    const Tensor result(out), left(a), right(b);
    check(out.batch ? aoti_torch_cpu_bmm_out(result.get(), left.get(), right.get())
                    : aoti_torch_cpu_mm_out(result.get(), left.get(), right.get()));
}

// out += a · b
template <class T>
void multiply_add(const View<T>& out, const View<const T>& a, const View<const T>& b) {
    if (out.rows == 0 || out.columns == 0 || a.columns == 0) return;
    const Tensor result(out), left(a), right(b);
    check(out.batch ? aoti_torch_cpu_baddbmm_out(result.get(), result.get(), left.get(), right.get(), 1, 1)
                    : aoti_torch_cpu_addmm_out(result.get(), result.get(), left.get(), right.get(), 1, 1));
}
