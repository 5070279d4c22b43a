// Tabs, theme, permalinks and the buttons of the header. The state of the page is in the address, after #.

function showMessage(text) {
  $("message").textContent = text;
  $("message").hidden = !text;
}

function start() {
  const data = JSON.parse($("data").textContent), root = document.documentElement;
  let tab = "image", quiet = true;
  const views = {};
  const write = () => {
    if (quiet) return;
    const link = new URLSearchParams({ tab, ...views[tab].link() });
    for (const kept of ["theme", "embed"]) if (root.dataset[kept]) link.set(kept, root.dataset[kept]);
    if (link.get("theme") === system()) link.delete("theme");
    history.replaceState(null, "", `#${link}`);
  };
  const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const theme = (name) => {
    root.dataset.theme = name;
    for (const view of Object.values(views)) view.draw();
  };
  const show = (name) => {
    tab = name;
    for (const one of ["image", "grid"]) {
      $(one).hidden = one !== name;
      $(`tab-${one}`).setAttribute("aria-selected", one === name);
    }
    write();
  };
  const read = () => {
    const link = new URLSearchParams(location.hash.slice(1));
    quiet = true;
    if (link.has("embed")) root.dataset.embed = "1";
    theme(["dark", "light"].includes(link.get("theme")) ? link.get("theme") : root.dataset.theme || system());
    show(link.get("tab") === "grid" ? "grid" : "image");
    views[tab].restore(link);
    quiet = false;
  };

  root.dataset.theme = system();
  views.image = new ImageView(data, write);
  views.grid = new Playground(write);
  for (const name of ["image", "grid"]) $(`tab-${name}`).addEventListener("click", () => show(name));
  $("theme").addEventListener("click", () => { theme(root.dataset.theme === "dark" ? "light" : "dark"); write(); });
  $("save").addEventListener("click", () => download(tab === "image" ? "attention.svg" : "grid.svg", views[tab].svg()));
  $("copy").addEventListener("click", async () => {
    write();
    await navigator.clipboard.writeText(location.href).catch(() => showMessage("The link is in the address bar."));
    $("copy").textContent = "Copied";
    setTimeout(() => { $("copy").textContent = "Copy link"; }, 1500);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(system()));
  addEventListener("hashchange", read);
  read();
}

start();
